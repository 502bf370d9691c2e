"""A rank prepared before its world exists trains with the same bits as one that was not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.support.ranks.rank_programs import join, make, undisturbed
from tests.support.ranks.rank_worlds import FLAGS, RecordingHooks, Worlds, tiny_spec, world_of

from holdfast_workers.parallelize import process_groups
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.training.recipe import World
from holdfast_workers.training.step_loop import train

MESHES: list[dict[str, Any]] = [
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_replicate": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 1},
    {"dp_shard": 1, "tp": 2},
    {"dp_shard": 2, "cp": 2},
    {"cp": 2, "context_method": "ring"},
]


def expected(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec
) -> tuple[dict[int, str], bool]:
    """The digests of the run, and whether the prepared model was used."""
    recipe = make(cache_dir, spec)
    recipe.expect(replace(world, attempt=0))
    assert not dist.is_initialized()
    ahead = recipe._expected
    join(port, world)
    recipe.build(world)
    recipe.initialize()
    hooks = RecordingHooks()
    train(recipe, world, spec, hooks, 0)
    used = ahead is not None and recipe.model is ahead.model
    process_groups.leave()
    return hooks.digests, used


@pytest.mark.seconds
@pytest.mark.parametrize(
    "mesh",
    [MESHES[0], *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES[1:])],
    ids=str,
)
def test_a_prepared_build_is_used_and_gives_the_same_bits(
    worlds: Worlds, mesh: dict[str, Any]
) -> None:
    flags = {} if mesh.get("context_method") == "ring" else FLAGS
    spec = tiny_spec(mesh, steps=2, dropout=0.1, **flags)
    bits = [result["digests"] for result in worlds.run(undisturbed, spec)]
    assert worlds.run(expected, spec) == [(digests, True) for digests in bits]


@pytest.mark.slow
def test_a_world_of_one_rank_is_also_prepared(worlds: Worlds) -> None:
    spec = tiny_spec({"dp_shard": 1}, steps=2, dtype="bfloat16")
    (alone,) = worlds.run(undisturbed, spec)
    assert worlds.run(expected, spec) == [(alone["digests"], True)]


def misplaced(port: int, cache_dir: Path, world: World, spec: TrainingSpec) -> str:
    recipe = make(cache_dir, spec)
    recipe.expect(world_of(spec, 3, 0))
    try:
        recipe.build(world)
    except ValueError as error:
        return str(error)
    return ""


def test_a_build_prepared_for_one_place_is_refused_for_another(worlds: Worlds) -> None:
    spec = tiny_spec({"dp_shard": 2, "tp": 2})
    refused: Any = worlds.start(misplaced, world_of(spec, 1, worlds.next_attempt()), spec).result()
    assert "cannot rebind" in refused
