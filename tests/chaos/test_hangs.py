"""Ranks that hang, in real processes: named, replaced in seconds, with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.chaos.conftest import STEPS, Undisturbed
from tests.support.nodes.history_proof import assert_same_history, incidents, not_fired
from tests.support.nodes.supervised import small_training, supervised

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_workers.spec import DetectionSpec

pytestmark = pytest.mark.chaos

DETECTION = DetectionSpec(hang_floor_s=0.5)
PATIENT: dict[str, Any] = {"timeouts": {"form_s": 1200.0}, "config": {"form_s": 900.0}}
"""Without the detection, a world that hangs while it forms would outlast the wait for its end."""


def hang(action: str, point: str, rank: int, step: int) -> dict[str, Any]:
    return {"action": action, "point": point, "rank": rank, "step": step}


EVERY_KIND = [
    hang("stop", "backward", 2, 15),
    hang("gil", "forward", 1, 24),
    hang("loop", "forward", 3, 33),
    hang("read", "forward", 0, 42),
    hang("collective", "agree", 2, 51),
]
STANDS_IN = {"gil": "_hold_gil", "loop": "carry_out", "read": "_block_in_read"}
"""The function that the stack of a hung rank shows, by kind."""


@pytest.mark.cell("P5", "rank")
def test_every_kind_of_hang_is_named_and_recovered_from_with_the_same_bits(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    training = small_training(STEPS, detection=DETECTION)
    with supervised(tmp_path, training, standbys=0, chaos=EVERY_KIND) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert not not_fired(run, EVERY_KIND)
        assert_same_history(run, undisturbed)
        closed = incidents(run)
        assert [incident["cause"] for incident in closed] == ["hang"] * len(EVERY_KIND), run.story()
        for planned, incident in zip(EVERY_KIND, closed, strict=True):
            (lost,) = (loss for loss in incident["lost"] if loss["cause"] == "hang")
            assert lost["rank"] == planned["rank"], (planned, incident)
            assert incident["suspects"][0]["rank"] == planned["rank"]
            assert incident["stacks"]
            assert STANDS_IN.get(planned["action"], "") in str(incident["stacks"]), planned
            assert incident["steps_lost"] <= 1


def test_a_rank_that_hangs_before_it_begins_its_order_is_named(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Its peers would wait for it in the rendezvous."""
    plan = [{"action": "gil", "point": "forming", "rank": 2}]
    training = small_training(STEPS, detection=DETECTION)
    with supervised(tmp_path, training, standbys=0, chaos=plan, **PATIENT) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert not not_fired(run, plan)
        assert_same_history(run, undisturbed)
        (incident,) = incidents(run)
        assert incident["cause"] == "hang", run.story()
        assert incident["suspects"][0]["rank"] == 2, run.story()


def test_a_rank_that_skips_a_collective_is_named(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The rank continues without the collective until it and its peers wait for each other."""
    recipe = "tests.support.ranks.recipes:LeavesOutACollective"
    training = small_training(STEPS, recipe=recipe, detection=DETECTION)
    with supervised(tmp_path, training, standbys=0) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, undisturbed)
        (incident,) = incidents(run)
        assert incident["cause"] == "hang", run.story()
        assert 2 in {suspect["rank"] for suspect in incident["suspects"]}, run.story()
        assert incident["suspects"][0]["rank"] == 2, run.story()


def test_long_phases_of_all_ranks_and_declared_phases_of_one_rank_are_no_incident(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    recipe = "tests.support.ranks.recipes:WaitsInManyWays"
    training = small_training(STEPS, recipe=recipe, detection=DETECTION)
    with supervised(tmp_path, training, standbys=0) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, undisturbed)
        assert not run.of(EventKind.INCIDENT_OPENED), run.story()
        stragglers = [stall["reason"] for stall in run.of(EventKind.STALLED)]
        assert any("load" in reason for reason in stragglers), run.story()
        assert any("evaluate" in reason for reason in stragglers), run.story()
        assert any("rank 1," in reason and "user" in reason for reason in stragglers), run.story()


def test_a_slow_rank_is_reported_soon_and_its_node_is_replaced(tmp_path: Path) -> None:
    slow = {"action": "slow", "point": "forward", "rank": 2, "step": 8, "factor": 3.0, "steps": 999}
    patience = {"straggler_patience_s": 0.5}
    training = small_training(1000, blocks=2, micro_batches=2)  # steps long enough to measure
    with supervised(tmp_path, training, standbys=1, chaos=[slow], config=patience) as run:

        def stragglers() -> list[dict[str, Any]]:
            return [event for event in run.of(EventKind.STRAGGLER) if event["rank"] == 2]

        def replaced() -> list[dict[str, Any]]:
            return [incident for incident in incidents(run) if incident["cause"] == "straggler"]

        run.wait(lambda: bool(replaced()) and len(stragglers()) > 1, 90.0)
        first, second = stragglers()[:2]
        assert (first["state"], first["agent"]) == ("slow", "n1"), run.story()
        assert first["factor"] > 1.5
        assert first["step"] < 150
        assert second["state"] == "moved", run.story()
        assert replaced()[0]["lost"][0]["rank"] == 2, run.story()
        assert replaced()[0]["steps_lost"] <= 1
