"""How often a tier of `auto` is saved, as it is measured, on the simulated cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.service.fake_cluster import row
from tests.support.simulation.simulated_jobs import cluster, running

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.policy.checkpoint_intervals import AutoTier
from holdfast_service.recovery.core_state import inputs
from holdfast_workers.protocol.messages import SignalKind

ROW = row(1, 1)


def test_an_interval_is_chosen_once_it_is_measured_told_with_reasons_and_kept() -> None:
    job = running(cluster(auto=frozenset({AutoTier.MEMORY}), intervals=(2, 0)), step=5)
    rows = tuple(
        replace(
            ROW, step=step, memory_saved=step % 2 == 0, step_time_s=0.1 + 0.05 * (step % 2 == 0)
        )
        for step in range(1, 60)
    )
    job.feed(inputs.StepsMeasured(rows))
    (told,) = job.told(EventKind.CHECKPOINT_INTERVAL)
    assert (told["tier"], told["before"]) == ("memory", 2)
    assert told["every_steps"] > 2
    assert told["cost_s"] == pytest.approx(0.05)
    assert "a save costs 50.0 ms of training" in told["why"]
    job.feed(inputs.StepsMeasured(rows))
    job.restart_supervisor()
    job.kill_rank(1)
    job.run_until(lambda: 2 in job.orders)
    assert job.orders[2].intervals == (told["every_steps"], 0)
    assert len(job.told(EventKind.CHECKPOINT_INTERVAL)) == 1


def test_remote_saves_that_follow_on_one_another_are_made_more_rarely_to_be_measured() -> None:
    job = running(cluster(auto=frozenset({AutoTier.REMOTE}), intervals=(1, 10)), step=5)
    rows = tuple(replace(ROW, step=step, remote_saving=True) for step in range(1, 40))
    job.feed(inputs.StepsMeasured(rows))
    (told,) = job.told(EventKind.CHECKPOINT_INTERVAL)
    assert (told["before"], told["every_steps"], told["cost_s"]) == (10, 20, None)
    assert "last longer" in told["why"]


def test_a_remote_tier_that_does_not_answer_is_no_measure_and_no_failure_of_training() -> None:
    job = running(cluster(auto=frozenset({AutoTier.REMOTE}), intervals=(1, 10)), step=5)
    job.signal(
        job.agents["n0"],
        SignalKind.SHARD_DELAYED,
        1,
        rank=0,
        detail={"step": 10, "message": "no bucket"},
    )
    job.run_until(lambda: bool(job.told(EventKind.INCIDENT_OPENED)))
    rows = tuple(replace(ROW, step=step, remote_saving=True) for step in range(1, 40))
    job.feed(inputs.StepsMeasured(rows))
    assert not job.told(EventKind.CHECKPOINT_INTERVAL)
    assert job.core._state.restores == 0
    job.kill_rank(1)
    job.run_until(lambda: job.core._state.restores == 1)
    assert job.core._state.remote_restores == 0
