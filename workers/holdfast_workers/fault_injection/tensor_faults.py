"""Injected faults in live tensors: a NaN, or one flipped bit, once on one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog
import torch
from torch import Tensor, nn

from holdfast_workers.fault_injection.kinds import FaultKind, Injection

if TYPE_CHECKING:
    from holdfast_workers.training.recipe import Recipe

_log = structlog.get_logger()


def tamper(recipe: Recipe, fault: Injection, point: str) -> None:
    """Execute the fault on the recipe's live state. Raises LookupError for an unknown target."""
    _log.warning(f"injected fault: {fault}", point=point)
    if fault.kind is FaultKind.NAN:
        _spoil_output(_module(recipe.model, fault.target), fault.value("where") == "gradient")
    else:
        _flip_bit(recipe.local_tensors(fault.value("where")), fault)


def _module(model: nn.Module, target: str | None) -> nn.Module:
    return model if target is None else model.get_submodule(target)


def _spoil_output(module: nn.Module, in_gradient: bool) -> None:
    """Turn the next output of `module`, or the gradient of that output, into NaN."""

    def spoil(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor | None:
        handle.remove()
        if not in_gradient:
            return _spoiled(output)
        output.register_hook(_spoiled)  # type: ignore[no-untyped-call]
        return None

    handle = module.register_forward_hook(spoil)


def _spoiled(values: Tensor) -> Tensor:
    return values * float("nan")


def _flip_bit(tensors: dict[str, Tensor], fault: Injection) -> None:
    present = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    if fault.target is not None and fault.target not in present:
        raise LookupError(f"no parameter {fault.target!r} on this rank: {', '.join(present)}")
    if not present:
        raise LookupError(f"no {fault.value('where')} on this rank")
    name = fault.target or max(present, key=lambda name: present[name].numel())
    with torch.no_grad():
        # `data`, because no version counter of torch notices a real flip.
        elements = present[name].data.view(-1).view(torch.int32)
        mask = 1 << fault.value("bit")
        elements[elements.numel() // 2] ^= mask - (1 << 32) if mask == 1 << 31 else mask
