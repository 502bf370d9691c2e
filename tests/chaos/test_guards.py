"""Nonfinite steps: skipped, rolled back or fatal, with their origin named, and with the bits of a
run that skips the bad data from its start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.conftest import Undisturbed
from tests.support.nodes.history_proof import assert_same_history, incidents, not_fired
from tests.support.nodes.supervised import SupervisedRun, small_training, supervised
from tests.support.ranks.recipes import PoisonedWindow

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.policy.decision_ladder import Action
from holdfast_workers.spec import GuardsSpec, TrainingSpec

pytestmark = pytest.mark.chaos

STEPS = 20
BAD = PoisonedWindow.WINDOW
STEP = BAD + 1
PLACE = {
    "ranks": [PoisonedWindow.RANK],
    "micro_batch": PoisonedWindow.MICRO_BATCH,
    "layer": PoisonedWindow.LAYER,
    "what": "output",
}

UndisturbedWith = Callable[[tuple[int, int]], Undisturbed]


@pytest.fixture(scope="module")
def with_ledger(tmp_path_factory: pytest.TempPathFactory) -> UndisturbedWith:
    """Undisturbed runs whose ledger holds the given windows from the start."""
    known: dict[tuple[int, int], Undisturbed] = {}

    def undisturbed_with(windows: tuple[int, int]) -> Undisturbed:
        if windows not in known:
            folder = tmp_path_factory.mktemp("knew")
            config = {"skipped": (windows,)}
            with supervised(folder, _training(), standbys=0, config=config) as run:
                assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
                known[windows] = Undisturbed(rows=run.rows, digests=run.digests)
        return known[windows]

    return undisturbed_with


def _training(**changes: Any) -> TrainingSpec:
    """Large enough for distinct origins of a nonfinite value."""
    return small_training(STEPS, blocks=2, micro_batches=2, **changes)


def _poisoned(**guards: Any) -> TrainingSpec:
    recipe = "tests.support.ranks.recipes:PoisonedWindow"
    return _training(recipe=recipe, guards=GuardsSpec.model_validate(guards))


def _only_trip(run: SupervisedRun) -> dict[str, Any]:
    trips = run.of(EventKind.GUARD_TRIPPED)
    assert len(trips) == 1, run.story()
    assert {name: trips[0][name] for name in PLACE} == PLACE
    assert (trips[0]["kind"], trips[0]["step"], trips[0]["window"]) == ("nonfinite", STEP, BAD)
    return trips[0]


def test_a_window_that_is_not_finite_is_skipped_and_training_goes_on(
    tmp_path: Path, with_ledger: UndisturbedWith
) -> None:
    with supervised(tmp_path, _poisoned()) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, with_ledger((BAD, BAD + 1)))
        trip = _only_trip(run)
        assert (trip["decision"], trip["ledger"]) == ("skip", [[BAD, BAD + 1]])
        assert not incidents(run)


@pytest.mark.parametrize("point", ["optimizer", pytest.param("skipped", marks=pytest.mark.soak)])
def test_a_rank_that_dies_after_a_skip_changes_no_bit(
    tmp_path: Path, with_ledger: UndisturbedWith, point: str
) -> None:
    plan = [{"point": point, "rank": 1, "step": STEP, "action": "kill"}]
    with supervised(tmp_path, _poisoned(), chaos=plan) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert not not_fired(run, plan)
        assert_same_history(run, with_ledger((BAD, BAD + 1)))
        _only_trip(run)
        assert len(incidents(run)) == 1


@pytest.mark.cell("P3", "loss guard")
def test_a_rollback_resumes_from_an_earlier_step_and_skips_the_windows_since(
    tmp_path: Path, with_ledger: UndisturbedWith
) -> None:
    with supervised(tmp_path, _poisoned(nonfinite={"policy": "rollback"})) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        trip = _only_trip(run)
        assert (trip["back_to"], trip["skipped"]) == (STEP - 2, [BAD - 1, BAD + 1])
        assert_same_history(run, with_ledger((BAD - 1, BAD + 1)))
        (incident,) = incidents(run)
        assert (incident["cause"], incident["decision"]) == ("guard", Action.ROLL_BACK)
        assert incident["restored_step"] == STEP - 2


def test_a_stop_names_step_rank_layer_and_micro_batch(tmp_path: Path) -> None:
    with supervised(tmp_path, _poisoned(nonfinite={"policy": "stop"})) as run:
        end = run.wait_end()
        assert (end["outcome"], end["code"]) == ("FAILED", "guard"), run.story()
        _only_trip(run)
        for text in (f"step {STEP}", "rank 2", PoisonedWindow.LAYER, "micro-batch 1"):
            assert text in end["message"]


@pytest.mark.parametrize("where", ["gradient", pytest.param("output", marks=pytest.mark.soak)])
def test_a_transient_nonfinite_value_costs_one_step_and_no_data(
    tmp_path: Path, with_ledger: UndisturbedWith, where: str
) -> None:
    plan: list[dict[str, Any]] = [
        {"point": "forward", "rank": 2, "step": STEP, "micro_batch": 1}
        | {"action": "nan", "where": where, "target": "blocks.1"}
    ]
    with supervised(tmp_path, _training(), standbys=0, chaos=plan) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert not not_fired(run, plan)
        assert_same_history(run, with_ledger((0, 0)))
        assert not incidents(run)
        (trip,) = run.of(EventKind.GUARD_TRIPPED)
        assert (trip["step"], trip["decision"], trip["skipped"]) == (STEP, "retry", None)
        if where == "output":  # found in the loss, also that of a tensor-parallel peer
            assert 2 in trip["ranks"] and not {0, 1} & set(trip["ranks"])
            assert (trip["what"], trip["micro_batch"]) == ("loss", 1)
        else:
            assert trip["layer"].startswith("blocks.1")
