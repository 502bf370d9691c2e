"""The end of a cancelled or paused job: when, and with which state, on the simulated cluster."""

from __future__ import annotations

import pytest
from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import cluster, forming, running

from holdfast_service.job_model.supervisor_protocol import EventKind, StopKind
from holdfast_service.placement.restore_points import RemoteCheckpoint
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.recovery.core_state.stage_timer import Stage

NOT_YET = (Stage.ENDED, Stage.ADOPTING)


def in_stage(stage: Stage) -> SimulatedCluster:
    job = running(cluster(standbys=0, wait_for_replacement_s=500.0))
    if stage is Stage.WAITING:
        job.kill_node("n1", back_after_s=None)
    elif stage not in (Stage.FINISHING, Stage.RUNNING):
        job.kill_rank(1)
    job.run_until(lambda: job.core.stage is stage)
    return job


STAGES = [stage for stage in Stage if stage not in NOT_YET]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", StopKind)
def test_a_job_without_time_to_stop_ends_at_once_from_every_stage(
    stage: Stage, kind: StopKind
) -> None:
    job = in_stage(stage) if stage is not Stage.ASSEMBLING else cluster()
    job.remotes.setdefault("mem://2.1", RemoteCheckpoint(2, 1, "mem://2.1"))
    job.feed(inputs.RemoteCheckpoints(tuple(job.remotes.values())))
    job.feed(inputs.StopRequested(kind, "enough", deadline=job.now))
    assert job.ended is not None
    assert job.ended.outcome == {"cancel": "CANCELLED", "pause": "PAUSED"}[kind]
    assert job.ended.message.startswith("enough")
    job.feed(
        inputs.StopRequested(kind, "again", job.now)
    )  # the cluster asserts that no effect follows


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage is not Stage.FINISHING])
def test_a_job_that_is_cancelled_stops_by_its_deadline_from_every_stage(stage: Stage) -> None:
    job = cluster() if stage is Stage.ASSEMBLING else in_stage(stage)
    deadline = job.now + 20.0
    job.feed(inputs.StopRequested(StopKind.CANCEL, "enough", deadline))
    assert job.run().outcome == "CANCELLED"
    assert job.now <= deadline
    if stage is Stage.ASSEMBLING:
        assert job.committed == []


def test_a_cancelled_job_makes_one_more_step_and_saves_it() -> None:
    job = running(cluster(), step=13)
    job.feed(inputs.StopRequested(StopKind.CANCEL, "enough", job.now + 60))
    end = job.run()
    last = job.committed[-1][1]
    assert last < 30
    assert (end.outcome, end.step) == ("CANCELLED", last)
    assert job.emitted(EventKind.CHECKPOINT_SAVED)[-1]["step"] == last
    assert job.emitted(EventKind.ENDED)[0]["durable_step"] == last
    assert f"step {last}, is in the remote tier" in end.message
    (stopping,) = job.emitted(EventKind.JOB_STOPPING)
    assert (stopping["wanted"], stopping["step"]) == ("cancel", 13)
    assert not job.emitted(EventKind.INCIDENT_OPENED)


def test_a_repeated_stop_changes_nothing_and_an_earlier_deadline_applies() -> None:
    job = running(cluster())
    job.publishes = False
    job.feed(inputs.StopRequested(StopKind.CANCEL, "enough", job.now + 60))
    for late in (60, 70):
        job.feed(inputs.StopRequested(StopKind.CANCEL, "enough", job.now + late))
    assert len(job.emitted(EventKind.JOB_STOPPING)) == 1
    job.feed(inputs.StopRequested(StopKind.CANCEL, "now", 0.0))
    assert job.ended is not None and job.ended.outcome == "CANCELLED"


def test_a_rank_that_dies_while_the_job_stops_is_recovered_and_the_last_state_is_saved() -> None:
    job = running(cluster(), step=13)
    job.feed(inputs.StopRequested(StopKind.PAUSE, "enough", job.now + 60))
    job.at(0.15, lambda: job.kill_rank(1))
    end = job.run()
    assert end.outcome == "PAUSED"
    assert job.emitted(EventKind.ENDED)[0]["durable_step"] == job.committed[-1][1] >= 13
    assert len(forming(job)) == 2


def test_a_pause_without_time_for_its_checkpoint_keeps_the_newest_durable_one() -> None:
    job = running(cluster(), step=13)
    job.run_until(lambda: bool(job.emitted(EventKind.CHECKPOINT_SAVED)))
    job.publishes = False
    job.feed(inputs.StopRequested(StopKind.PAUSE, "enough", job.now + 5))
    end = job.run()
    assert (end.outcome, end.step) == ("PAUSED", 10)
    assert "step 10 is in the remote tier, out of" in end.message


def test_a_pause_without_any_durable_state_is_undone_and_the_job_continues() -> None:
    job = cluster()
    job.remote_every = 0
    running(job, step=5)
    job.publishes = False
    job.feed(inputs.StopRequested(StopKind.PAUSE, "enough", job.now + 5))
    job.run_until(lambda: bool(job.emitted(EventKind.STOP_UNDONE)))
    job.publishes = True
    assert job.run().outcome == "SUCCEEDED"
    assert [step for _, step in job.committed] == list(range(1, 31))
    assert not job.emitted(EventKind.INCIDENT_OPENED)


def test_a_supervisor_restarted_during_a_stop_completes_the_stop() -> None:
    job = running(cluster(), step=13)
    job.feed(inputs.StopRequested(StopKind.PAUSE, "enough", job.now + 60))
    job.at(0.25, job.restart_supervisor)
    end = job.run()
    assert end.outcome == "PAUSED"
    assert job.emitted(EventKind.ENDED)[0]["durable_step"] == job.committed[-1][1]
    assert len(forming(job)) == 1


def test_a_cancel_during_a_pause_ends_the_job_as_cancelled() -> None:
    job = running(cluster(), step=13)
    job.feed(inputs.StopRequested(StopKind.PAUSE, "rest", job.now + 60))
    job.feed(inputs.StopRequested(StopKind.CANCEL, "enough", job.now + 60))
    assert job.run().outcome == "CANCELLED"


def test_a_job_that_is_finishing_when_cancelled_succeeds() -> None:
    job = cluster()
    job.run_until(lambda: job.core.stage is Stage.FINISHING)
    job.feed(inputs.StopRequested(StopKind.CANCEL, "enough", job.now + 60))
    assert job.run().outcome == "SUCCEEDED"


@pytest.mark.parametrize("kind", StopKind)
def test_a_stop_before_the_adoption_of_a_running_attempt_loses_no_step(
    kind: StopKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = running(cluster(), step=13)
    cut_short = classmethod(lambda cls, events: cls(attempt=1))
    with monkeypatch.context() as patched:
        patched.setattr(Facts, "from_events", cut_short)
        job.restart_supervisor()
    assert job.core.stage is Stage.ADOPTING
    job.feed(inputs.StopRequested(kind, "enough", job.now + 60))
    assert job.run().outcome in ("CANCELLED", "PAUSED")
    assert job.emitted(EventKind.ENDED)[0]["durable_step"] == job.committed[-1][1] >= 13
