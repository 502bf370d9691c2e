"""A rank stops computing a step once its attempt is over."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.ranks.rank_programs import Interrupted, make
from tests.support.ranks.rank_worlds import RecordingHooks, tiny_spec

from holdfast_workers.training.recipe import World
from holdfast_workers.training.step_loop import train


def test_a_rank_checks_between_two_micro_batches_whether_its_attempt_is_over(cache: Path) -> None:
    spec = tiny_spec({"dp_shard": 1})
    world = World(0, 1, {"dp_shard": 1}, 1, "cpu")
    recipe = make(cache, spec)
    recipe.build(world)
    recipe.initialize()
    hooks = RecordingHooks()

    def leave_second() -> None:
        if ("forward", 1) in hooks.phases:
            raise Interrupted

    recipe.leave_if_over = leave_second
    with pytest.raises(Interrupted):
        train(recipe, world, spec, hooks, 0)
    assert hooks.phases.count(("forward", 1)) == 1
    assert recipe.applied_step == 0
