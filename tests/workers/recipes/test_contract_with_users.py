"""What recipes and functions of users may rely on: few required methods, and promised names."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.ranks import contract_programs as programs
from tests.support.ranks.minimal_recipe import MinimalRecipe
from tests.support.ranks.rank_worlds import ALONE, RecordingHooks, Worlds, start_from_seed

from holdfast_workers import recipes
from holdfast_workers.functions import Context
from holdfast_workers.recipes import (
    Agree,
    Agreed,
    Contribution,
    Gate,
    GuardTripped,
    PhaseReporter,
    Recipe,
    StepOutcome,
)
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.training.step_loop import Steps

ROOT = Path(__file__).parents[3]
STEPS, STOP = 6, 3

REQUIRED = frozenset(
    {"build", "initialize", "abandon_step", "layout", "freeze", "read_state", "train_step"}
)
"""The methods that a recipe must have."""
OPTIONAL = frozenset(
    {
        *("prepare", "expect", "rebind", "write_state", "state_digest", "model"),
        *("local_tensors", "parameters", "run", "observed_nonfinite", "trace"),
        *("repeats_steps", "spec", "cache_dir", "applied_step", "guard_memory"),
        *("leave_if_over",),
    }
)
"""What a recipe has from its base class."""
CONTEXT = frozenset(
    {
        *("rank", "world_size", "attempt", "device", "mesh", "data_index"),
        *("data_parallel", "config", "seed", "last_step", "register", "shard", "steps"),
        *("should_stop", "batches", "micro_batches", "backward", "step", "loss_weight"),
    }
)
"""The names that the context of a function has."""
NOT_PROMISED = frozenset({"finish", "ended_by", "has_left"})
"""Public names of the context that only Holdfast uses."""
MINIMAL = "tests.support.ranks.minimal_recipe:MinimalRecipe"


def spec_of(**program: str) -> TrainingSpec:
    return TrainingSpec.model_validate(
        {
            **program,
            "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 2},
            "parallel": {"dp_shard": 2},
        }
    )


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    yield Worlds(tmp_path_factory.mktemp("cache"))


@pytest.mark.slow
def test_a_minimal_recipe_trains_recovers_and_resumes_with_the_same_bits(
    worlds: Worlds, tmp_path: Path
) -> None:
    spec = spec_of(recipe=MINIMAL)
    whole = worlds.run(programs.whole, spec, tmp_path)
    assert sorted(whole[0].digests) == list(range(STEPS + 1))
    assert len(set(whole[0].digests.values())) == STEPS + 1
    assert worlds.run(programs.recovered, spec, tmp_path, STOP) == whole
    for rank, history in enumerate(worlds.run(programs.resumed, spec, tmp_path, STOP)):
        assert history.digests == {s: whole[rank].digests[s] for s in range(STOP, STEPS + 1)}
        assert history.samples == {s: whole[rank].samples[s] for s in range(STOP + 1, STEPS + 1)}


class SpoiledOnce(MinimalRecipe):
    """Contributes a loss that is not finite to the first agreement on step `STOP`."""

    spoiled = False

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: PhaseReporter) -> StepOutcome:
        def agree_or_trip(share: Contribution) -> Agreed:
            if step == STOP and not self.spoiled:
                self.spoiled = True
                share = replace(share, loss_sum=math.nan, nonfinite=True)
            agreed = agree(share)
            if agreed.trip is not None:
                raise GuardTripped(agreed.trip)
            return agreed

        return super().train_step(step, agree_or_trip, gate, phase)


def trained_alone(recipe: Recipe) -> RecordingHooks:
    start_from_seed(recipe)
    hooks = RecordingHooks()
    recipe.run(lambda: Steps(recipe, ALONE, recipe.spec, hooks, 0))
    return hooks


def test_the_defaults_of_a_recipe_suffice_for_guards_and_digests() -> None:
    spec = spec_of()
    recipe = MinimalRecipe(spec, Path("/nonexistent"))
    undisturbed = trained_alone(recipe)
    spoiled = trained_alone(SpoiledOnce(spec, Path("/nonexistent")))
    assert [trip.step for trip in spoiled.trips] == [STOP]
    assert spoiled.digests == undisturbed.digests
    payload = memoryview(bytearray(recipe.layout().payload_bytes))
    assert recipe.write_state(payload, STEPS) == recipe.state_digest(STEPS)


def test_no_further_method_is_required() -> None:
    """Give each new one a default, and say in docs/recipes.md what a recipe forgoes with it."""
    assert Recipe.__abstractmethods__ == REQUIRED


def test_every_promised_name_exists_and_every_public_name_is_promised() -> None:
    recipe = MinimalRecipe(spec_of(), Path("/nonexistent"))
    assert public(recipe) == REQUIRED | OPTIONAL
    assert public(Context) == CONTEXT | NOT_PROMISED


def public(owner: object) -> set[str]:
    names = set(dir(owner)) | set(vars(owner))
    if owner is Context:
        names |= set(re.findall(r"^        self\.(\w+)", inspect.getsource(Context), re.MULTILINE))
    return {name for name in names if not name.startswith("_")}


def test_the_documents_name_all_that_is_promised() -> None:
    page = (ROOT / "docs/recipes.md").read_text()
    assert not [name for name in sorted(REQUIRED | OPTIONAL) if f"`{name}`" not in page]
    assert not [name for name in recipes.__all__ if f"`{name}`" not in page]
    tutorial = (ROOT / "docs/tutorial.md").read_text()
    assert not [name for name in sorted(CONTEXT) if f"`ctx.{name}" not in tutorial]


def test_the_recipe_of_the_documents_trains() -> None:
    page = (ROOT / "docs/recipes.md").read_text()
    (shown,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, type[Recipe]] = {}
    exec(shown, names)
    hooks = trained_alone(names["Line"](spec_of(), Path("/nonexistent")))
    assert [row.step for row in hooks.rows] == list(range(1, STEPS + 1))
