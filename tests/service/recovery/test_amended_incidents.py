"""A word on a closed incident amends its record, and counts nothing for a second time."""

from __future__ import annotations

from dataclasses import replace

from tests.service.recovery.test_repeated_faults import recovered
from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import cluster, running

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.recovery.core import RecoveryCore
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.recovery.core_state.inputs import NodeWord
from holdfast_service.recovery.core_state.state import Stage


def account(core: RecoveryCore) -> tuple[object, ...]:
    state = core._state
    return (
        *(state.failures, state.preemptions, state.offences),
        *(state.restores, state.remote_restores, state.without_progress),
        state.incident.number if state.incident is not None else None,
    )


def lost_its_agent() -> SimulatedCluster:
    """A job that got over the loss of n0's agent, of whose node nothing was said yet."""
    job = running(cluster(steps=300))
    job.kill_agent("n0", back_after_s=None)
    recovered(job, 1)
    return job


def told_again(job: SimulatedCluster) -> RecoveryCore:
    """A supervisor that knows the job from its events alone."""
    return RecoveryCore(job.config, job.now, Facts.from_events(job.events))


def test_what_a_closed_incident_counted_is_not_counted_again_when_it_is_amended() -> None:
    job = lost_its_agent()
    before = account(job.core)
    told = len(job.told(EventKind.INCIDENT_UPDATED))
    job.feed(NodeWord("n0", lost=True, evidence="the raylet is gone"))
    assert len(job.told(EventKind.INCIDENT_UPDATED)) == told + 1
    assert account(told_again(job)) == account(job.core) == before


def test_an_open_incident_outlasts_the_amendment_of_an_older_one() -> None:
    job = lost_its_agent()
    job.kill_rank(2, "SIGSEGV")
    job.run_until(lambda: job.core.stage not in (Stage.RUNNING, Stage.GATHERING))
    before = account(job.core)
    assert before[-1] == 2
    job.feed(NodeWord("n0", lost=True, evidence="the raylet is gone"))
    assert account(told_again(job)) == account(job.core) == before


def test_an_incident_that_is_told_closed_twice_was_one_restore() -> None:
    job = lost_its_agent()
    last = next(one for one in reversed(job.events) if one.kind is EventKind.INCIDENT_CLOSED)
    facts = Facts.from_events([*job.events, replace(last, seq=last.seq + 1)])
    assert facts.restores == job.core._state.restores == 1
