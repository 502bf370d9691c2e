"""A late report on a closed incident amends its record and counts nothing twice."""

from __future__ import annotations

from dataclasses import replace

from tests.service.recovery.test_repeated_faults import recovered
from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import cluster, running

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.recovery.core import RecoveryCore
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.recovery.core_state.inputs import NodeStatus
from holdfast_service.recovery.core_state.stage_timer import Stage


def account(core: RecoveryCore) -> tuple[object, ...]:
    state, incident = core.state, core.state.incidents.current
    return (
        *(state.budget.failures, state.budget.preemptions, state.budget.offences),
        *(state.intervals.restores, state.intervals.remote_restores),
        state.progress.without_progress,
        incident.number if incident is not None else None,
    )


def lost_its_agent() -> SimulatedCluster:
    """A job that recovered from the loss of n0's agent; the state of the node is not known yet."""
    job = running(cluster(steps=300))
    job.kill_agent("n0", back_after_s=None)
    recovered(job, 1)
    return job


def replayed_core(job: SimulatedCluster) -> RecoveryCore:
    """A core that knows the job only from its events."""
    return RecoveryCore(job.config, job.now, Facts.from_events(job.events))


def test_an_amended_closed_incident_is_not_counted_again() -> None:
    job = lost_its_agent()
    before = account(job.core)
    updates = len(job.emitted(EventKind.INCIDENT_UPDATED))
    job.feed(NodeStatus("n0", lost=True, evidence="the raylet is gone"))
    assert len(job.emitted(EventKind.INCIDENT_UPDATED)) == updates + 1
    assert account(replayed_core(job)) == account(job.core) == before


def test_an_open_incident_survives_the_amendment_of_an_older_one() -> None:
    job = lost_its_agent()
    job.kill_rank(2, "SIGSEGV")
    job.run_until(lambda: job.core.stage not in (Stage.RUNNING, Stage.GATHERING))
    before = account(job.core)
    assert before[-1] == 2
    job.feed(NodeStatus("n0", lost=True, evidence="the raylet is gone"))
    assert account(replayed_core(job)) == account(job.core) == before


def test_an_incident_closed_twice_counts_as_one_restore() -> None:
    job = lost_its_agent()
    last = next(event for event in reversed(job.events) if event.kind == EventKind.INCIDENT_CLOSED)
    facts = Facts.from_events([*job.events, replace(last, seq=last.seq + 1)])
    assert facts.restores == job.core.state.intervals.restores == 1
