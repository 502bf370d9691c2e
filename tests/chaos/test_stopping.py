"""Cancelled and paused jobs first save their last state, even if processes die (P2, P5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.chaos.conftest import STEPS, Undisturbed
from tests.support.nodes.history_proof import assert_same_history, not_fired
from tests.support.nodes.supervised import SupervisedRun, small_training, supervised

from holdfast_service.job_model.supervisor_protocol import EventKind, StopKind
from holdfast_workers.checkpoint.manifest import list_checkpoints, verify
from holdfast_workers.checkpoint.open_storage import open_storage

pytestmark = pytest.mark.chaos


def assert_saved(run: SupervisedRun, end: dict[str, Any]) -> None:
    """The newest checkpoint is complete and holds the last step."""
    assert end["durable_step"] == max(run.rows) == end["step"], run.story()
    newest = list_checkpoints(open_storage(str(run.remote_root)))[0]
    assert newest.step == end["step"]
    verify(open_storage(newest.uri))


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
