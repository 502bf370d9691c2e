"""Cancelled and paused jobs first save their last state, even if processes die (P2, P5)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.conftest import STEPS, Undisturbed
from tests.support.nodes.history_proof import assert_same_history, incidents, not_fired
from tests.support.nodes.supervised import SupervisedRun, small_training, supervised

from holdfast_service.job_model.supervisor_protocol import EventKind, StopKind
from holdfast_workers.checkpoint.manifest import list_checkpoints, verify
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.spec import DetectionSpec

pytestmark = pytest.mark.chaos

UNWATCHED = DetectionSpec(enabled=False)


def assert_saved(run: SupervisedRun, end: dict[str, Any]) -> None:
    """The newest checkpoint is complete and holds the last step."""
    assert end["durable_step"] == max(run.rows) == end["step"], run.story()
    newest = list_checkpoints(open_storage(str(run.remote_root)))[0]
    assert newest.step == end["step"]
    verify(open_storage(newest.uri))


def test_a_cancelled_job_saves_its_last_state_and_stops(tmp_path: Path) -> None:
    with supervised(tmp_path, small_training(4000), standbys=1) as run:
        run.wait_step(5)
        run.stop(StopKind.CANCEL)
        end = run.wait_end()
        assert end["outcome"] == "CANCELLED", run.story()
        assert_saved(run, end)
        assert not incidents(run)
        run.wait(lambda: not run.workers())


@pytest.mark.cell("P2", "storage")
def test_a_paused_job_resumes_with_the_same_bits_after_deaths_in_its_last_save(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    plan: list[dict[str, Any]] = [
        {"point": "save", "rank": 3, "action": "kill"},  # during its last copy
        {"point": "saver", "rank": 1, "action": "kill"},
        {"point": "finalizer", "action": "kill"},
    ]
    with supervised(tmp_path, small_training(STEPS), standbys=0, chaos=plan) as first:
        first.wait_step(10)
        first.stop(StopKind.PAUSE)
        end = first.wait_end()
        assert end["outcome"] == "PAUSED", first.story()
        assert not not_fired(first, plan)
        assert_saved(first, end)
        attempts = first.supervisor.report(first.cursors).attempt
    with supervised(tmp_path, small_training(STEPS), standbys=0, resumes=first) as second:
        second.wait(lambda: len(second.of(EventKind.ENDED)) == 2, 120)
        assert second.wait_end()["outcome"] == "SUCCEEDED", second.story()
        assert_same_history(second, undisturbed)
        numbers = [event["attempt"] for event in second.of(EventKind.ATTEMPT_FORMING)]
        assert numbers == sorted(set(numbers))
        again = second.of(EventKind.ATTEMPT_FORMING)[-1]
        assert again["attempt"] > attempts
        assert again["restore"]["step"] == end["step"]
        assert set(again["restore"]["tiers"].values()) == {"remote"}


def test_a_rank_that_hangs_while_the_job_stops_is_replaced_and_the_last_state_saved(
    tmp_path: Path,
) -> None:
    with supervised(tmp_path, small_training(4000), standbys=0) as run:
        run.wait_step(5)
        os.kill(run.pids()[2], signal.SIGSTOP)
        run.stop(StopKind.CANCEL)
        end = run.wait_end()
        assert end["outcome"] == "CANCELLED", run.story()
        assert_saved(run, end)
        assert [incident["cause"] for incident in incidents(run)] == ["hang"]


def test_an_undetected_hang_delays_a_stop_until_the_deadline_only(
    tmp_path: Path,
) -> None:
    with supervised(tmp_path, small_training(4000, detection=UNWATCHED), standbys=0) as run:
        run.wait_step(5)
        os.kill(run.pids()[2], signal.SIGSTOP)
        run.stop(StopKind.CANCEL, within_s=3.0)
        end = run.wait_end()
        assert (end["outcome"], end["durable_step"]) == ("CANCELLED", None), run.story()
        assert "nothing is in the remote tier" in end["message"]
        assert "was on two nodes in memory" in end["message"]


def test_a_pause_that_can_save_nothing_is_undone_and_costs_no_step(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with supervised(tmp_path, small_training(STEPS, detection=UNWATCHED), standbys=0) as run:
        run.wait_step(5)
        os.kill(run.pids()[2], signal.SIGSTOP)
        run.stop(StopKind.PAUSE, within_s=2.0)
        run.wait(lambda: bool(run.of(EventKind.STOP_UNDONE)))
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, undisturbed)


def test_the_successor_of_a_dead_supervisor_completes_the_pause(
    tmp_path: Path,
) -> None:
    with supervised(tmp_path, small_training(4000), standbys=0) as run:
        run.wait_step(5)
        run.stop(StopKind.PAUSE)
        run.wait(lambda: bool(run.of(EventKind.JOB_STOPPING)))
        run.lose_supervisor()
        end = run.wait_end()
        assert end["outcome"] == "PAUSED", run.story()
        assert_saved(run, end)
        assert not incidents(run)
