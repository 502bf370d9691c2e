"""Recipes and functions of users keep working: programs of 0.1 run, and promised names stay."""

from __future__ import annotations

import hashlib
import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.ranks import contract_programs as programs
from tests.support.ranks.rank_worlds import ALONE, RecordingHooks, Worlds, start_from_seed
from tests.support.written_against_0_1.minimal_recipe import MinimalRecipe

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
FROZEN = ROOT / "tests/support/written_against_0_1"
STEPS, STOP = 6, 3

REQUIRED = frozenset(
    {"build", "initialize", "abandon_step", "layout", "freeze", "read_state", "train_step"}
)
"""The methods that a recipe must have since 0.1."""
OPTIONAL = frozenset(
    {
        *("prepare", "expect", "rebind", "write_state", "state_digest", "model"),
        *("local_tensors", "parameters", "run", "observed_nonfinite", "trace"),
        *("repeats_steps", "spec", "cache_dir", "applied_step", "guard_memory"),
        *("leave_if_over",),
    }
)
"""What a recipe has from its base class since 0.1."""
CONTEXT = frozenset(
    {
        *("rank", "world_size", "attempt", "device", "mesh", "data_index"),
        *("data_parallel", "config", "seed", "last_step", "register", "shard", "steps"),
        *("should_stop", "batches", "micro_batches", "backward", "step"),
    }
)
"""The names that the context of a function has since 0.1."""
CONTEXT_SINCE_0_2 = frozenset({"loss_weight"})
"""Those that it has since 0.2."""
NOT_PROMISED = frozenset({"finish", "ended_by", "has_left"})
"""Public names of the context that only Holdfast uses."""
DIGESTS = {
    "minimal_recipe.py": "19be3a9b13acbfa970e54696832d7a62559a0bb447c40ca821bac0ff61c4f652",
    "maximal_recipe.py": "de27a9d8cd5e05dc650d689e46d5dc30934e20b2e4513037de33ec6ad626c663",
    "minimal_function.py": "bb788e31bb3a2584289b20259db01a718f182ba86235c3f1e384e23368230323",
    "maximal_function.py": "36f2b2e4d7d51ad9e7aac8850c304b8a91a1d2e0030c231cbb8cd739b9f202e6",
}
PROGRAMS = {
    "minimal recipe": {"recipe": "minimal_recipe:MinimalRecipe"},
    "maximal recipe": {"recipe": "maximal_recipe:MaximalRecipe"},
    "minimal function": {"function": "minimal_function:main"},
    "maximal function": {"function": "maximal_function:main"},
}


def spec_of(program: dict[str, str]) -> TrainingSpec:
    named = {kind: f"tests.support.written_against_0_1.{name}" for kind, name in program.items()}
    return TrainingSpec.model_validate(
        {
            **named,
            "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 2},
            "parallel": {"dp_shard": 2},
        }
    )


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    yield Worlds(tmp_path_factory.mktemp("cache"))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_written_against_0_1_trains_recovers_and_resumes_with_the_same_bits(
    worlds: Worlds, program: dict[str, str], tmp_path: Path
) -> None:
    spec = spec_of(program)
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
    spec = spec_of({})
    recipe = MinimalRecipe(spec, Path("/nonexistent"))
    undisturbed = trained_alone(recipe)
    spoiled = trained_alone(SpoiledOnce(spec, Path("/nonexistent")))
    assert [trip.step for trip in spoiled.trips] == [STOP]
    assert spoiled.digests == undisturbed.digests
    payload = memoryview(bytearray(recipe.layout().payload_bytes))
    assert recipe.write_state(payload, STEPS) == recipe.state_digest(STEPS)


def test_no_method_is_required_that_0_1_did_not_require() -> None:
    added = sorted(Recipe.__abstractmethods__ - REQUIRED)
    assert not added, (
        f"Recipe requires {added}, which recipes written against 0.1 do not have: give each a "
        "default in holdfast_workers/training/recipe.py, and say in its docstring and in "
        "docs/recipes.md what a recipe forgoes with it"
    )
    dropped = sorted(REQUIRED - Recipe.__abstractmethods__)
    assert not dropped, f"{dropped} are optional now: move them to OPTIONAL and in docs/recipes.md"


def test_every_promised_name_exists_and_every_public_name_is_promised() -> None:
    recipe = MinimalRecipe(spec_of({}), Path("/nonexistent"))
    assert public(recipe) == REQUIRED | OPTIONAL
    assert public(Context) == CONTEXT | CONTEXT_SINCE_0_2 | NOT_PROMISED


def public(owner: object) -> set[str]:
    names = set(dir(owner)) | set(vars(owner))
    if owner is Context:
        names |= set(re.findall(r"^        self\.(\w+)", inspect.getsource(Context), re.MULTILINE))
    return {name for name in names if not name.startswith("_")}


def test_the_frozen_programs_use_all_that_is_promised() -> None:
    function = (FROZEN / "maximal_function.py").read_text()
    assert set(re.findall(r"\bctx\.(\w+)", function)) == CONTEXT
    recipe = (FROZEN / "maximal_recipe.py").read_text()
    imported = re.search(r"^from holdfast_workers\.recipes import \((.*?)\)", recipe, re.S | re.M)
    minimal = (FROZEN / "minimal_recipe.py").read_text()
    assert imported is not None
    used = set(re.findall(r"\w+", imported[1])) | set(re.findall(r"\w+", minimal))
    assert set(recipes.__all__) <= used
    assert set(re.findall(r"\w+", recipe)) >= REQUIRED | OPTIONAL


def test_the_documents_name_all_that_is_promised() -> None:
    page = (ROOT / "docs/recipes.md").read_text()
    assert not [name for name in sorted(REQUIRED | OPTIONAL) if f"`{name}`" not in page]
    assert not [name for name in recipes.__all__ if f"`{name}`" not in page]
    tutorial = (ROOT / "docs/tutorial.md").read_text()
    assert not [
        name for name in sorted(CONTEXT | CONTEXT_SINCE_0_2) if f"`ctx.{name}" not in tutorial
    ]


def test_the_recipe_of_the_documents_trains() -> None:
    page = (ROOT / "docs/recipes.md").read_text()
    (shown,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, type[Recipe]] = {}
    exec(shown, names)
    hooks = trained_alone(names["Line"](spec_of({}), Path("/nonexistent")))
    assert [row.step for row in hooks.rows] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("name", DIGESTS)
def test_the_frozen_programs_are_not_edited(name: str) -> None:
    digest = hashlib.sha256((FROZEN / name).read_bytes()).hexdigest()
    assert digest == DIGESTS[name], (
        f"{name} was edited, but it stands for a user's program: mend Holdfast instead, and write "
        "new programs beside it for what is new"
    )
