"""The programs of ranks that run a user's recipe or function, whichever its spec names.

Each returns the digest of the world's state after every step, and the samples of every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.ranks.rank_programs import Interrupted, join, load, save
from tests.support.ranks.rank_worlds import RecordingHooks

from holdfast_workers.parallelize import process_groups
from holdfast_workers.recipes import lookup
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.training.recipe import Recipe, World
from holdfast_workers.training.step_loop import Steps


@dataclass(frozen=True)
class RankHistory:
    digests: dict[int, str]
    samples: dict[int, str]

    @classmethod
    def of(cls, hooks: RecordingHooks) -> RankHistory:
        return cls(hooks.digests, {row.step: row.samples for row in hooks.rows})


def whole(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec, folder: Path
) -> RankHistory:
    """Train from the seed, and write the state of every step to `folder`."""
    recipe, hooks = _built(port, cache_dir, world, spec), RecordingHooks()
    hooks.on_checkpoint = lambda step, recipe: save(recipe, folder, world, step)
    _train(recipe, world, hooks, lambda: _from_seed(recipe))
    return RankHistory.of(hooks)


def resumed(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec, folder: Path, step: int
) -> RankHistory:
    """Continue from a written state, in a new process."""
    recipe, hooks = _built(port, cache_dir, world, spec), RecordingHooks()
    _train(recipe, world, hooks, lambda: load(recipe, folder, world, step))
    return RankHistory.of(hooks)


def recovered(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec, folder: Path, stop: int
) -> RankHistory:
    """Be interrupted in the step after `stop`, and continue in a new attempt in this process."""

    def interrupt(name: str, step: int) -> None:
        if (name, step) == ("agree", stop + 1) and hooks.phases.count((name, step)) == 1:
            raise Interrupted

    recipe, hooks = _built(port, cache_dir, world, spec), RecordingHooks(interrupt)
    with contextlib.suppress(Interrupted):
        _train(recipe, world, hooks, lambda: _from_seed(recipe))
    assert hooks.rows[-1].step == stop
    recipe.abandon_step()
    process_groups.leave()
    again = replace(world, attempt=world.attempt + 1000)
    join(port, again)
    recipe.rebind(again)
    _train(recipe, again, hooks, lambda: load(recipe, folder, world, stop))
    return RankHistory.of(hooks)


def _built(port: int, cache_dir: Path, world: World, spec: TrainingSpec) -> Recipe:
    join(port, world)
    recipe = lookup.make_recipe(spec, cache_dir)
    recipe.prepare()
    recipe.build(world)
    return recipe


def _from_seed(recipe: Recipe) -> int:
    recipe.initialize()
    return 0


def _train(recipe: Recipe, world: World, hooks: RecordingHooks, start: Callable[[], int]) -> None:
    recipe.run(lambda: Steps(recipe, world, recipe.spec, hooks, start()))
    process_groups.leave()
