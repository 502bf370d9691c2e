"""Injected faults in the tensors of a live model, on the recipe itself, in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from tests.support.ranks.optimizer_programs import with_optimizer
from tests.support.ranks.rank_worlds import start_from_seed, tiny_spec

from holdfast_workers.fault_injection.fault_points import FaultPoints
from holdfast_workers.fault_injection.kinds import FaultKind, Injection
from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.spec import OptimizerSpec
from holdfast_workers.training.recipe import PhaseReporter
from holdfast_workers.training.step_agreement import Agreed, Contribution, Record, fold

STEPS = 4


@pytest.fixture
def make(cache: Path) -> Callable[[], PretrainRecipe]:
    """A recipe at step 0."""

    def create() -> PretrainRecipe:
        recipe = PretrainRecipe(tiny_spec({}), cache)
        start_from_seed(recipe)
        return recipe

    return create


class NotFinite(Exception):
    """A rank's contribution to the agreement on a step was not finite."""


def run(recipe: PretrainRecipe, *faults: Injection) -> list[str]:
    """The digest after each step."""
    points = FaultPoints(None)
    points.recipe = recipe
    for fault in faults:
        points.arm(fault, lambda: None)
    digests = []
    for step in range(1, STEPS + 1):

        def agree(share: Contribution, step: int = step) -> Agreed:
            if share.nonfinite:
                raise NotFinite(step, share)
            return fold([Record(1, step, share, -1)])

        recipe.train_step(step, agree, lambda _step: None, cast(PhaseReporter, points.reach))
        points.reach("checkpoint", step)
        digests.append(recipe.state_digest(step))
    return digests


@pytest.mark.parametrize("target", [None, "blocks.1"])
@pytest.mark.parametrize("where", ["output", "gradient"])
def test_a_nan_makes_only_its_step_nonfinite(
    make: Callable[[], PretrainRecipe], where: str, target: str | None
) -> None:
    recipe = make()
    fault = Injection(FaultKind.NAN, at_step=3, where=where, target=target, micro_batch=1)
    with pytest.raises(NotFinite) as caught:
        run(recipe, fault)
    step, share = caught.value.args
    assert (step, math.isnan(share.loss_sum)) == (3, where == "output")
    recipe.abandon_step()
    assert run(make()) == run(make())  # the fault left no trace


@pytest.mark.parametrize("where", ["gradient", "parameter", "moment"])
def test_a_bit_flip_changes_the_digest_from_its_step_on(
    make: Callable[[], PretrainRecipe], where: str
) -> None:
    untouched = run(make())
    touched = run(make(), Injection(FaultKind.BIT_FLIP, at_step=3, where=where))
    assert [before == after for before, after in zip(untouched, touched, strict=True)] == [
        *(True, True, False, False)
    ]


def test_an_unknown_target_is_named(make: Callable[[], PretrainRecipe]) -> None:
    with pytest.raises(LookupError, match=r"no parameter 'blocks\.9"):
        run(make(), Injection(FaultKind.BIT_FLIP, where="parameter", target="blocks.9.x"))


def test_an_optimizer_without_moments_has_none_to_flip(cache: Path) -> None:
    optimizer = OptimizerSpec(name="sgd", lr=0.1, momentum=0.0)
    recipe = PretrainRecipe(with_optimizer(tiny_spec({}), optimizer), cache)
    start_from_seed(recipe)
    with pytest.raises(LookupError, match="no moment on this rank"):
        run(recipe, Injection(FaultKind.BIT_FLIP, where="moment"))
