"""The optimizer that a spec names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

from torch import Tensor

from holdfast_workers.optim.adamw import LocalAdamW
from holdfast_workers.optim.elementwise import LocalLion, LocalSGD
from holdfast_workers.optim.layerwise import LocalAdafactor, LocalLAMB, LocalLARS
from holdfast_workers.optim.local_optimizer import LocalOptimizer, LocalParameter, ParameterPeers
from holdfast_workers.optim.muon import LocalMuon
from holdfast_workers.spec import OptimizerSpec


def local_parameter(
    name: str,
    tensor: Tensor,
    whole_shape: tuple[int, ...],
    sharded: Mapping[str, int],
    spec: OptimizerSpec,
    *,
    in_block: bool,
) -> LocalParameter:
    """A parameter with the decay and the factor on the rate that the spec gives it."""
    group = spec.group_of(name)
    decay = spec.weight_decay if len(whole_shape) > 1 else 0.0
    if group is not None and group.weight_decay is not None:
        decay = group.weight_decay
    scale = 1.0 if group is None else group.lr_scale
    return LocalParameter(name, tensor, whole_shape, decay, scale, sharded, in_block)


def new_optimizer(
    parameters: Sequence[LocalParameter], spec: OptimizerSpec, peers: ParameterPeers
) -> LocalOptimizer:
    """The optimizer, with a state whose values are zero."""
    optimizer: LocalOptimizer
    match spec.name:
        case "adamw":
            optimizer = LocalAdamW(parameters, spec)
        case "sgd":
            optimizer = LocalSGD(parameters, spec)
        case "adafactor":
            optimizer = LocalAdafactor(parameters, peers)
        case "lion":
            optimizer = LocalLion(parameters, spec)
        case "muon":
            optimizer = LocalMuon(parameters, spec, peers)
        case "lars":
            optimizer = LocalLARS(parameters, spec, peers)
        case "lamb":
            optimizer = LocalLAMB(parameters, spec, peers)
        case _:
            assert_never(spec.name)
    return optimizer
