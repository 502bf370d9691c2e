"""Programs that train a user's function on one rank of a real world."""

from __future__ import annotations

import os
import signal
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.support.ranks.rank_programs import join, load, rejoined, save
from tests.support.ranks.rank_worlds import ALONE, RecordingHooks

from holdfast_workers.checkpoint.load import load_whole_state
from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.shards import save_shard
from holdfast_workers.parallelize import process_groups
from holdfast_workers.recipes import lookup
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.state.replicas import CorruptionFound
from holdfast_workers.training.recipe import Recipe, World
from holdfast_workers.training.step_loop import Steps


def trained_alone(spec: TrainingSpec, hooks: RecordingHooks) -> RecordingHooks:
    """Train on one rank, in this process."""
    recipe = lookup.make_recipe(spec, Path("/nonexistent"))
    recipe.prepare()
    recipe.build(ALONE)
    _run(recipe, ALONE, spec, hooks, None, 0)
    return hooks


def trained(
    port: int,
    cache_dir: Path,
    world: World,
    spec: TrainingSpec,
    folder: Path | None = None,
    start: int = 0,
) -> dict[str, Any]:
    """Train from step 0, or from the state of step `start` in `folder`; write the state of every
    step to `folder`."""
    join(port, world)
    recipe = _made(cache_dir, world, spec)
    hooks, calls = RecordingHooks(), _count_sums_in_backward()
    _run(recipe, world, spec, hooks, folder, start)
    names = [tensor.name for tensor in recipe.layout().tensors]
    process_groups.leave()
    losses = [row.loss for row in hooks.rows]
    return {"digests": hooks.digests, "sums": len(calls), "names": names, "losses": losses}


def printed(port: int, cache_dir: Path, world: World, spec: TrainingSpec) -> list[str]:
    """The lines that the rank prints while it trains."""
    with redirect_stdout(StringIO()) as output:
        trained(port, cache_dir, world, spec)
    return output.getvalue().splitlines()


def survivor(
    port: int,
    cache_dir: Path,
    world: World,
    spec: TrainingSpec,
    folder: Path,
    kill_at: int,
    in_backward: bool = True,
) -> dict[str, Any]:
    """Train; the highest rank kills itself when it would sum the second gradient of step `kill_at`,
    or not `in_backward`, when it would commit the step; the others call the function again, in the
    next attempt."""
    before = process_groups.open_sockets()
    join(port, world)
    recipe = _made(cache_dir, world, spec)
    sockets = process_groups.open_sockets() - before
    hooks = RecordingHooks()
    if world.rank == world.world_size - 1:
        if in_backward:
            _die_in_a_sum(hooks, kill_at)
        else:
            hooks = RecordingHooks(partial(_die_in, "reduce", kill_at))
    again = rejoined(
        port, recipe, world, sockets, lambda: _run(recipe, world, spec, hooks, folder, 0)
    )
    _run(recipe, again, spec, hooks, folder, kill_at - 1)
    process_groups.leave()
    return {"digests": hooks.digests, "pid": os.getpid()}


def flipped(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec, name: str, step: int
) -> str:
    """Train; the highest rank flips a bit of the tensor `name` of the first module after `step`.
    Returns the message of the corruption that is found."""
    join(port, world)
    recipe = _made(cache_dir, world, spec)
    hooks = RecordingHooks()

    @torch.no_grad()
    def flip(at: int, recipe: Recipe) -> None:
        if (at, world.rank) == (step, world.world_size - 1):
            recipe.model.state_dict()[name].view(-1).view(torch.int32)[0] ^= 1

    hooks.on_checkpoint = flip
    try:
        _run(recipe, world, spec, hooks, None, 0)
    except CorruptionFound as found:
        return str(found)
    return ""


def saved_remotely(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec, folder: Path, step: int
) -> dict[str, Any]:
    """Train; write the shard of the state after `step` into the checkpoint `folder`."""
    join(port, world)
    recipe = _made(cache_dir, world, spec)
    hooks, kept = RecordingHooks(), dict[str, Any]()

    def save_shard_of(at: int, recipe: Recipe) -> None:
        if at == step:
            payload = memoryview(bytearray(recipe.layout().payload_bytes))
            recipe.write_state(payload, at)
            kept["record"] = save_shard(
                LocalStorage(folder), payload, recipe.layout(), world.rank, 1, at
            )
            kept["state"] = _values(recipe)

    hooks.on_checkpoint = save_shard_of
    _run(recipe, world, spec, hooks, None, 0)
    process_groups.leave()
    return {"digests": hooks.digests, **kept}


def restored_remotely(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec, folder: Path, step: int
) -> dict[str, Any]:
    """Continue from the checkpoint `folder` of `step`."""
    join(port, world)
    recipe = _made(cache_dir, world, spec)
    hooks, kept = RecordingHooks(), dict[str, Any]()

    def begin() -> Steps:
        recipe.initialize()
        payload = memoryview(bytearray(recipe.layout().payload_bytes))
        recipe.write_state(payload, step)
        load_whole_state(
            LocalStorage(folder), recipe.layout(), payload, mesh=world.mesh, rank=world.rank
        )
        start = recipe.read_state(payload)
        kept["state"] = _values(recipe)
        return Steps(recipe, world, spec, hooks, start)

    recipe.run(begin)
    process_groups.leave()
    return {"digests": hooks.digests, **kept}


def _values(recipe: Recipe) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in recipe.model.state_dict().items()}


def _made(cache_dir: Path, world: World, spec: TrainingSpec) -> Recipe:
    recipe = lookup.make_recipe(spec, cache_dir)
    recipe.prepare()
    recipe.build(world)
    return recipe


def _run(
    recipe: Recipe,
    world: World,
    spec: TrainingSpec,
    hooks: RecordingHooks,
    folder: Path | None,
    start: int,
) -> None:
    if folder is not None:
        hooks.on_checkpoint = lambda step, _: save(recipe, folder, world, step)

    def begin() -> Steps:
        recipe.initialize()
        if start:
            assert folder is not None
            load(recipe, folder, world, start)
        return Steps(recipe, world, spec, hooks, start)

    recipe.run(begin)


def _count_sums_in_backward() -> list[int]:
    """Collects the sizes of sums that are started asynchronously."""
    original, sizes = dist.all_reduce, []

    def count(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("async_op"):
            sizes.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    setattr(dist, "all_reduce", count)  # noqa: B010
    return sizes


def _die_in(phase: str, step: int, name: str, of_step: int) -> None:
    if (name, of_step) == (phase, step):
        os.kill(os.getpid(), signal.SIGKILL)


def _die_in_a_sum(hooks: RecordingHooks, step: int) -> None:
    original, calls = dist.all_reduce, []

    def die(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("async_op") and hooks.phases[-1][1] == step:
            calls.append(step)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(dist, "all_reduce", die)  # noqa: B010
