"""The programs of ranks in the tests of optimizers: updates with given gradients on any mesh, and
the whole state that the ranks' pieces make up."""

from __future__ import annotations

import pickle
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tests.support.ranks import rank_programs as programs
from tests.support.ranks.rank_worlds import RecordingHooks
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

from holdfast_workers.optim.new_optimizer import local_parameter, new_optimizer
from holdfast_workers.parallelize import process_groups
from holdfast_workers.parallelize.mesh import SHARD_AXIS, make_mesh
from holdfast_workers.parallelize.parameter_peers import MeshPeers
from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.spec import OptimizerSpec, TrainingSpec
from holdfast_workers.state.layout import TensorEntry
from holdfast_workers.state.rank_state import local_of
from holdfast_workers.training.recipe import World
from holdfast_workers.training.step_loop import train

RATE = 1e-2
Values = NDArray[Any]
Whole = dict[str, Values]
"""Tensors of a state by name."""


@dataclass(frozen=True)
class Piece:
    entry: TensorEntry
    values: Values

    @property
    def slices(self) -> tuple[slice, ...]:
        pairs = zip(self.entry.offsets, self.entry.shape, strict=True)
        return tuple(slice(start, start + size) for start, size in pairs)


def with_optimizer(spec: TrainingSpec, optimizer: OptimizerSpec, **train: Any) -> TrainingSpec:
    update = {"optimizer": optimizer, **train}
    return spec.model_copy(update={"train": spec.train.model_copy(update=update)})


def driven(
    port: int,
    cache_dir: Path,
    world: World,
    spec: TrainingSpec,
    optimizers: Sequence[OptimizerSpec],
    steps: tuple[int, int],
    start: Path | None = None,
) -> list[list[Piece]]:
    """This rank's state of each optimizer after `steps`, first and last one, with gradients that
    depend on the parameter's name and the step; from step 0, or the whole states in `start`."""
    programs.join(port, world)
    found = []
    wholes = [None] * len(optimizers) if start is None else pickle.loads(start.read_bytes())
    for optimizer, whole in zip(optimizers, wholes, strict=True):
        recipe = programs.make(cache_dir, with_optimizer(spec, optimizer))
        recipe.build(world)
        recipe.initialize()
        if whole is not None:
            _load(recipe, whole, steps[0] - 1)
        built = recipe._require_built()
        for step in range(steps[0], steps[1] + 1):
            gradients = [
                _gradient(name, step, box.global_shape)[box.slices()].clone()
                for name, box in zip(built.names, built.boxes, strict=True)
            ]
            built.optimizer.step(gradients, RATE)
        found.append(_pieces(recipe, steps[1]))
    process_groups.leave()
    return found


def assembled(ranks: Sequence[Sequence[Piece]]) -> Whole:
    """The whole tensors. Each element is primary on exactly one rank, and every rank that holds it
    has the same bits."""
    wholes: Whole = {}
    counts: Whole = {}
    for piece in (piece for rank in ranks for piece in rank if piece.entry.primary):
        name, shape = piece.entry.name, piece.entry.global_shape
        whole = wholes.setdefault(name, np.zeros(shape, piece.values.dtype))
        whole[piece.slices] = piece.values
        counts.setdefault(name, np.zeros(shape, int))[piece.slices] += 1
    assert [name for name, count in counts.items() if (count != 1).any()] == []
    for piece in (piece for rank in ranks for piece in rank):
        held = wholes[piece.entry.name][piece.slices]
        assert held.tobytes() == piece.values.tobytes(), piece.entry
    return wholes


def _pieces(recipe: PretrainRecipe, step: int) -> list[Piece]:
    payload = bytearray(recipe.layout().payload_bytes)
    recipe.write_state(memoryview(payload), step)
    return [
        Piece(entry, _view(payload, entry).copy())
        for entry in recipe.layout().tensors
        if _is_of_parameter(entry)
    ]


def _load(recipe: PretrainRecipe, whole: Whole, step: int) -> None:
    payload = bytearray(recipe.layout().payload_bytes)
    recipe.write_state(memoryview(payload), step)
    for entry in recipe.layout().tensors:
        if _is_of_parameter(entry):
            target = _view(payload, entry)
            target[...] = whole[entry.name][Piece(entry, target).slices]
    recipe.read_state(memoryview(payload))


def _is_of_parameter(entry: TensorEntry) -> bool:
    return entry.name.startswith(("model.", "optim.", "ema."))


def _view(payload: bytearray, entry: TensorEntry) -> Values:
    dtype = np.dtype(entry.dtype)
    count = entry.nbytes // dtype.itemsize
    return np.frombuffer(payload, dtype, count, entry.offset).reshape(entry.shape)


def _gradient(name: str, step: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return 0.1 * torch.randn(shape, generator=generator)


def averages_follow(port: int, cache_dir: Path, world: World, spec: TrainingSpec) -> bool:
    """Whether the moving averages follow their formula in each step of a training."""
    recipe = programs.started(port, cache_dir, world, spec)
    built, decay = recipe._require_built(), spec.train.ema
    assert decay is not None
    expected = [local.double() for local in built.locals]
    good = [all(map(torch.equal, built.averages, built.locals))]

    def look(step: int, _: Any) -> None:
        for average, local in zip(expected, built.locals, strict=True):
            average.mul_(decay).add_(local.double(), alpha=1.0 - decay)
        pairs = zip(built.averages, expected, strict=True)
        good.append(all(torch.allclose(own.double(), e, atol=1e-6) for own, e in pairs))
        good.append(not all(map(torch.equal, built.averages, built.locals)))

    hooks = RecordingHooks()
    hooks.on_checkpoint = look
    train(recipe, world, spec, hooks, 0)
    process_groups.leave()
    return all(good) and len(good) == 1 + 2 * spec.train.last_step


def temporaries(
    port: int,
    _cache_dir: Path,
    world: World,
    spec: TrainingSpec,
    optimizers: Sequence[OptimizerSpec],
) -> list[float]:
    """The most memory that a step of each optimizer takes for itself, in units of this rank's
    parameters, which are matrices of equal shape, divided over `dp_shard`, and a vector."""
    programs.join(port, world)
    shapes = {f"blocks.{index}.weight": (128, 128) for index in range(24)} | {"norm.weight": (8,)}
    mesh = make_mesh(world, spec.detection.collective_timeout_s)
    whole = {name: torch.randn(shape) for name, shape in shapes.items()}
    placed: dict[str, Tensor] = dict(whole)
    sharded: dict[str, int] = {}
    if world.size(SHARD_AXIS) > 1:
        shards = mesh[SHARD_AXIS]
        placed = {name: distribute_tensor(each, shards, [Shard(0)]) for name, each in whole.items()}
        sharded = {SHARD_AXIS: 0}
    found = []
    for optimizer_spec in optimizers:
        parameters = [
            local_parameter(
                name,
                local_of(each).clone(),
                shapes[name],
                sharded,
                optimizer_spec,
                in_block=name.startswith("blocks."),
            )
            for name, each in placed.items()
        ]
        optimizer = new_optimizer(parameters, optimizer_spec, MeshPeers(world, mesh, placed))
        gradients = [torch.randn_like(each.tensor) for each in parameters]
        held = sum(each.tensor.nbytes for each in parameters)
        step = partial(optimizer.step, gradients, RATE)
        # At times gloo's thread lets go of the tensors of a finished exchange late.
        found.append(min(_most_taken(step) for _ in range(4)) / held)
    process_groups.leave()
    return found


def _most_taken(step: Callable[[], None]) -> int:
    """The most bytes that are allocated within a step."""
    time.sleep(0.05)  # nothing of the step before is left
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events = profiled.profiler.kineto_results.events()
    memory = [each for each in events if each.name() == "[memory]"]
    changes: list[int] = [each.nbytes() for each in sorted(memory, key=_start)]
    return max(accumulate(changes, initial=0))


def _start(event: Any) -> int:
    return int(event.start_ns())
