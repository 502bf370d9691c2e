"""Measured save intervals of the `auto` tiers, on the simulated cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.service.fake_cluster import row
from tests.support.simulation.simulated_jobs import cluster, running

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.recovery.core_state import inputs
from holdfast_workers.protocol.signals import ShardDelayed

ROW = row(1, 1)

AUTO = {"every_steps": "auto"}


def test_a_measured_interval_is_chosen_once_emitted_with_its_reason_and_kept() -> None:
    job = running(cluster(memory=AUTO, remote={"every_steps": 0}), step=5)
    rows = tuple(
        replace(
            ROW, step=step, memory_saved=step % 2 == 0, step_time_s=0.1 + 0.05 * (step % 2 == 0)
        )
        for step in range(1, 60)
    )
    job.feed(inputs.StepsMeasured(rows))
    (event,) = job.emitted(EventKind.CHECKPOINT_INTERVAL)
    assert (event["tier"], event["before"]) == ("memory", 2)
    assert event["every_steps"] > 2
    assert event["cost_s"] == pytest.approx(0.05)
    assert "a save costs 50.0 ms of training" in event["why"]
    job.feed(inputs.StepsMeasured(rows))
    job.restart_supervisor()
    job.kill_rank(1)
    job.run_until(lambda: 2 in job.orders)
    assert job.orders[2].intervals == (event["every_steps"], 0)
    assert len(job.emitted(EventKind.CHECKPOINT_INTERVAL)) == 1


def test_back_to_back_remote_saves_are_spread_so_that_they_can_be_measured() -> None:
    job = running(cluster(remote=AUTO), step=5)
    rows = tuple(replace(ROW, step=step, remote_saving=True) for step in range(1, 80))
    job.feed(inputs.StepsMeasured(rows))
    (event,) = job.emitted(EventKind.CHECKPOINT_INTERVAL)
    assert (event["before"], event["every_steps"], event["cost_s"]) == (20, 40, None)
    assert "takes longer" in event["why"]


def test_a_remote_outage_is_no_measurement_and_no_training_failure() -> None:
    job = running(cluster(remote=AUTO), step=5)
    job.signal(job.agents["n0"], ShardDelayed(10, "no bucket"), 1, rank=0)
    job.run_until(lambda: bool(job.emitted(EventKind.INCIDENT_OPENED)))
    rows = tuple(replace(ROW, step=step, remote_saving=True) for step in range(1, 40))
    job.feed(inputs.StepsMeasured(rows))
    assert not job.emitted(EventKind.CHECKPOINT_INTERVAL)
    assert job.core.state.intervals.restores == 0
    job.kill_rank(1)
    job.run_until(lambda: job.core.state.intervals.restores == 1)
    assert job.core.state.intervals.remote_restores == 0
