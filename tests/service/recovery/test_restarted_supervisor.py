"""The takeover by a restarted supervisor, on the simulated cluster."""

from __future__ import annotations

from tests.support.simulation.core_config import core_config
from tests.support.simulation.simulated_agent import SimAgent
from tests.support.simulation.simulated_jobs import closed, cluster, forming, running

from holdfast_service.job_model.events.attempts import StandbyEvent
from holdfast_service.job_model.events.codec import numbered
from holdfast_service.job_model.supervisor_protocol import (
    EventKind,
    Phase,
    StopKind,
)
from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.recovery.core import RecoveryCore
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_workers.protocol import commands
from holdfast_workers.protocol.messages import ErrorKind, ErrorReport
from holdfast_workers.protocol.signals import WorkerFailed


def test_a_restarted_supervisor_adopts_the_running_attempt_without_touching_it() -> None:
    job = running(cluster())
    job.restart_supervisor()
    assert job.core.phase is Phase.RUNNING
    assert job.run().outcome == "SUCCEEDED"
    assert len(forming(job)) == 1
    assert [step for _, step in job.committed] == list(range(1, 31)), "it cost no step"
    assert not job.emitted(EventKind.INCIDENT_OPENED)


def test_a_restarted_supervisor_detects_a_fault_during_its_absence() -> None:
    job = running(cluster())
    job.restart_supervisor()
    job.kill_rank(2)
    assert job.run().outcome == "SUCCEEDED"
    (incident,) = closed(job)
    assert incident["cause"] == "worker_crash"
    attempts = [event["attempt"] for event in forming(job)]
    assert attempts == [1, 2]


def test_a_supervisor_restart_during_a_recovery_leaves_one_incident() -> None:
    job = running(cluster())
    job.kill_node("n0")
    job.run_until(lambda: job.core.stage is Stage.FENCING)
    job.restart_supervisor()
    assert job.run().outcome == "SUCCEEDED"
    numbers = {data["incident"] for data in job.emitted(EventKind.INCIDENT_OPENED)}
    assert numbers == {1}
    assert closed(job)[0]["restored_step"] is not None


def test_a_formed_world_ends_the_wait_that_a_supervisor_adopted() -> None:
    job = running(cluster(standbys=0, wait_for_replacement_s=30.0))
    job.kill_node("n0", back_after_s=15.0)
    job.run_until(lambda: job.core.stage is Stage.WAITING)
    (first,) = job.emitted(EventKind.WAITING)
    back_at = job.now + 15.0
    job.run_until(lambda: job.now >= back_at - 0.05)
    job.restart_supervisor()  # the node is present, so it waits for nothing
    formed = len(forming(job))
    job.run_until(lambda: len(forming(job)) > formed)
    assert len(job.emitted(EventKind.WAITING)) == 1
    job.kill_node("n0", back_after_s=25.0)
    assert job.run().outcome == "SUCCEEDED"
    assert job.emitted(EventKind.WAITING)[-1]["until"] > first["until"]


def test_a_truncated_journal_does_not_cost_the_running_attempt() -> None:
    job = running(cluster())
    del job.events[:-1]
    job.events[0] = numbered(99, job.now, StandbyEvent(agent="n0", state="ready"))
    real = Facts.from_events
    try:
        Facts.from_events = classmethod(  # type: ignore[method-assign, assignment]
            lambda cls, events: cls(attempt=1)
        )
        job.restart_supervisor()
    finally:
        Facts.from_events = real  # type: ignore[method-assign]
    assert job.run().outcome == "SUCCEEDED"
    assert forming(job) == []


def test_no_world_forms_while_an_agent_of_it_is_fenced_once_more() -> None:
    """On a new cluster the agents start with the supervisor, which fences them before they are
    ready, and after. A fence makes the store of a program's attempt: only its answer names it."""
    shape = WorldShape.of({"dp_shard": 2, "tp": 1}, 2)
    config = core_config((shape,), command=("train",))
    agent = SimAgent("n0", config)
    core = RecoveryCore(config, 0.0, Facts(attempt=1))

    def orders(event: inputs.Input) -> list[commands.Command]:
        wanted = (commands.Fence, commands.Form)
        return [effect for effect in core.handle(event, 1.0) if isinstance(effect, wanted)]

    (fence,) = orders(inputs.AgentUp(agent.report()))
    assert fence == commands.Fence("n0", 2, agent.incarnation)
    assert orders(inputs.Fenced("n0", 2, agent.report())) == []
    agent.become_ready()
    assert orders(inputs.AgentUp(agent.report())) == [fence]
    assert orders(inputs.NodesAvoided({})) == []
    agent.start_store()
    (form,) = orders(inputs.Fenced("n0", 2, agent.report()))
    assert isinstance(form, commands.Form) and form.order.store_port == agent.store_port


def test_an_ended_job_stays_ended_after_a_restart() -> None:
    job = cluster()
    job.run()
    facts = Facts.from_events(job.events)
    core = RecoveryCore(job.config, job.now, facts)
    assert (core.phase, core.next_deadline()) == (Phase.ENDED, None)
    assert core.handle(inputs.StopRequested(StopKind.CANCEL, "late", 0.0), job.now) == ()


def test_signals_of_an_older_attempt_change_nothing() -> None:
    job = running(cluster())
    job.glitch()
    job.run_until(lambda: job.core.stage is Stage.RUNNING and job.core.attempt == 2)
    job.restart_supervisor()  # replays nothing, but adopts attempt 2
    old = job.agents["n0"]
    worker = next(iter(old.workers.values()))
    job.run_until(lambda: job.core.stage is Stage.RUNNING)
    late = WorkerFailed(ErrorReport(ErrorKind.COMMUNICATION, "E", "late", "", 3))
    job.signal(old, late, 1, rank=0, worker=worker.name)
    assert job.run().outcome == "SUCCEEDED"
    assert len(forming(job)) == 2
