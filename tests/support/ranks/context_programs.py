"""The programs of ranks in the tests of context parallelism; each returns plain values."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.support.ranks import rank_programs as programs
from tests.support.ranks.rank_worlds import RecordingHooks

from holdfast_workers.parallelize import context, process_groups, ring_attention
from holdfast_workers.parallelize.mesh import data_mesh
from holdfast_workers.parallelize.ring_attention import DividedPositions
from holdfast_workers.protocol.messages import StepRow
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.state.layout import TensorEntry
from holdfast_workers.training.recipe import World
from holdfast_workers.training.step_loop import train

EXCHANGES = {
    "all_gather": (context, "all_gather"),
    "ring": (ring_attention._Ring, "start"),
    "ulysses": (context, "_exchanged"),
}
"""Method -> the function with which a rank takes part in an exchange."""


def in_contiguous_order(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec, knows_order: bool
) -> list[StepRow]:
    """Train with contiguous parts of the sequences. If `knows_order` is False, attention assumes
    the balanced ones."""
    balanced = context.balanced_positions
    context.balanced_positions = context.contiguous_positions
    programs.join(port, world)
    recipe = programs.make(cache_dir, spec)
    recipe.build(world)
    size, length = world.size("cp"), spec.model.sequence_length
    assumed = DividedPositions.of([balanced(length, rank, size) for rank in range(size)])
    blocks: list[Any] = [] if knows_order else list(recipe.model.blocks.values())
    for block in blocks:
        attend = block.attention.attend
        block.attention.attend = partial(attend.func, attend.args[0], assumed, *attend.args[2:])
    recipe.initialize()
    hooks = RecordingHooks()
    train(recipe, world, spec, hooks, 0)
    process_groups.leave()
    return hooks.rows


def killed_in_exchange(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec, folder: Path, at: int, nth: int
) -> dict[str, Any]:
    """The highest rank kills itself in its n-th exchange of step `at`; the others continue in the
    next attempt."""
    holder, name = EXCHANGES[spec.parallel.context_method]
    original, exchanges = getattr(holder, name), [-1]

    def counted(*args: Any) -> Any:
        if exchanges[0] >= 0:
            exchanges[0] += 1
        if exchanges[0] == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    record = RecordingHooks.phase

    def phase(self: RecordingHooks, name: str, step: int, micro_batch: int = 0) -> None:
        if step == at and exchanges[0] < 0 and world.rank == world.world_size - 1:
            exchanges[0] = 0
        record(self, name, step, micro_batch)

    setattr(holder, name, counted)
    RecordingHooks.phase = phase  # type: ignore[method-assign]
    return programs.survivor(port, cache_dir, world, spec, folder, ("never", at))


def boxes(port: int, cache_dir: Path, world: World, spec: TrainingSpec) -> tuple[TensorEntry, ...]:
    """The entries of this rank's state."""
    programs.join(port, world)
    recipe = programs.make(cache_dir, spec)
    recipe.build(world)
    entries = recipe.layout().tensors
    process_groups.leave()
    return entries


def random_numbers(port: int, cache_dir: Path, world: World, spec: TrainingSpec) -> int:
    """The seed of this rank's generator in the second step."""
    recipe = programs.started(port, cache_dir, world, spec)
    seeds: dict[int, int] = {}
    hooks = RecordingHooks(lambda _, step: seeds.__setitem__(step, torch.initial_seed()))
    train(recipe, world, spec, hooks, 0)
    process_groups.leave()
    return seeds[2]


def timeouts(port: int, cache_dir: Path, world: World, spec: TrainingSpec) -> set[float]:
    """The limits in seconds of the groups over which parameters and positions are exchanged."""
    programs.join(port, world)
    recipe = programs.make(cache_dir, spec)
    recipe.build(world)
    mesh = recipe._require_built().mesh
    assert mesh is not None
    groups = [data_mesh(mesh).get_group(), mesh["cp"].get_group()]
    found = {
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups
    }
    process_groups.leave()
    return found
