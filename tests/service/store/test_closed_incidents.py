"""A closed incident is a record: later reports add late evidence to it, or are of another fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.service.fake_cluster import FakeSupervisor, row
from tests.support.web.seed_events import started_job

from holdfast_service.job_model.events.incidents import IncidentRecord, with_late_evidence
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.lifecycle import Phase
from holdfast_service.job_model.supervisor_protocol import (
    Cursors,
    EventKind,
    JobPlan,
    StartWait,
    SupervisorReport,
)
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.policy.incidents import Incident
from holdfast_service.policy.quarantine import QuarantineRules
from holdfast_service.store import job_row_stats, queries
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import find_job
from holdfast_service.store.models import JobRecord
from holdfast_service.store.projection import cursors_of, has_changes, store_report
from holdfast_service.store.transaction import job_transaction
from holdfast_service.views.attempts import AttemptView
from holdfast_service.views.incidents import IncidentView
from holdfast_workers.protocol.codec import as_json
from holdfast_workers.protocol.messages import StepRow

AGENT_LOST = Fault(Cause.AGENT_LOST, 1, 100.0, "agent n1 is lost", ranks=(2, 3), agent="n1")
CRASH = Fault(Cause.WORKER_CRASH, 1, 100.0, "rank 1 ended by SIGKILL", rank=1, agent="n0")
HANG = Fault(Cause.HANG, 2, 200.0, "rank 2 is silent", rank=2, agent="n1")


def data(incident: Incident) -> dict[str, Any]:
    return as_json(IncidentRecord.of(incident))


def closed(number: int, fault: Fault, at: float = 100.0) -> Incident:
    opened = replace(Incident.opened(number, fault, at), failures=(at,))
    return opened.closed(at + 5, "first_step", "attempt 2 runs from step 9")


class StoredJob:
    """A job, and the reports of its supervisor."""

    def __init__(self, store: Store, job: str) -> None:
        self.store, self.job = store, job
        self.supervisor = FakeSupervisor(JobPlan(job, JobSpec(name="x")))

    async def report(self, **changes: Any) -> None:
        async with job_transaction(self.store, self.job, now=5000.0) as tx:
            report = replace(self.supervisor.report(Cursors()), **changes)
            await store_report(tx, report, QuarantineRules(), hold_end=False)

    async def incidents(self) -> list[IncidentView]:
        async with self.store.read() as session:
            job = await find_job(session, self.job)
            return await queries.incident_views(session, job, 0, 10, lost={}, formed=[])

    async def attempts(self) -> list[AttemptView]:
        async with self.store.read() as session:
            return await queries.attempt_views(session, self.job, 0, 10)

    async def kinds(self) -> list[str]:
        async with self.store.read() as session:
            return [event.kind for event in await queries.event_views(session, self.job, 0, 100)]

    async def record(self) -> JobRecord:
        async with self.store.read() as session:
            return await session.get_one(JobRecord, self.job)


@pytest.fixture
async def stored(store: Store) -> StoredJob:
    return StoredJob(store, await started_job(store, JobSpec(name="x"), 1.0, 2.0))


async def test_another_fault_with_the_number_of_a_closed_incident_does_not_replace_it(
    stored: StoredJob,
) -> None:
    stored.supervisor.emit(EventKind.INCIDENT_OPENED, **data(Incident.opened(1, CRASH, 100.0)))
    stored.supervisor.emit(EventKind.INCIDENT_CLOSED, **data(closed(1, CRASH)))
    await stored.report()
    before = await stored.incidents()
    stored.supervisor.emit(EventKind.INCIDENT_OPENED, **data(Incident.opened(1, HANG, 200.0)))
    stored.supervisor.emit(EventKind.INCIDENT_CLOSED, **data(closed(1, HANG, 200.0)))
    await stored.report()
    assert await stored.incidents() == before and before[0].cause == "worker_crash"
    assert (await stored.kinds()).count(EventKind.EVENT_UNREADABLE) == 2, "nothing is silent"
    assert cursors_of(await stored.record()).incident == 1, "so that the next one gets another"


async def test_that_an_agent_was_lost_with_its_node_may_be_known_late(stored: StoredJob) -> None:
    incident = closed(1, AGENT_LOST)
    stored.supervisor.emit(EventKind.INCIDENT_CLOSED, **data(incident))
    await stored.report()
    late = incident.with_node_lost("n1").with_evidence("the raylet is gone")
    stored.supervisor.emit(EventKind.INCIDENT_UPDATED, **data(late))
    await stored.report()
    [view] = await stored.incidents()
    assert (view.cause, view.lost[0].cause) == ("node_lost", "node_lost")
    assert view.evidence == ("agent n1 is lost", "the raylet is gone")
    assert EventKind.EVENT_UNREADABLE not in await stored.kinds()


async def test_an_incident_that_was_open_when_its_supervisor_was_lost_is_closed_by_the_next_one(
    stored: StoredJob,
) -> None:
    stored.supervisor.emit(EventKind.INCIDENT_OPENED, **data(Incident.opened(1, CRASH, 100.0)))
    stored.supervisor.emit(EventKind.INCIDENT_OPENED, **data(Incident.opened(2, HANG, 200.0)))
    await stored.report()
    first, second = await stored.incidents()
    assert first.closed_at is not None and "is not known" in (first.resolution or "")
    assert second.closed_at is None


async def test_an_incident_that_is_open_when_everything_of_the_job_is_lost_ends_there(
    stored: StoredJob,
) -> None:
    stored.supervisor.emit(EventKind.ATTEMPT_ENDED, attempt=1, reason="agent n1 is lost")
    stored.supervisor.emit(EventKind.INCIDENT_OPENED, **data(Incident.opened(1, CRASH, 100.0)))
    await stored.report()  # at 5,000: the last sign of life
    async with job_transaction(stored.store, stored.job, now=9000.0) as tx:
        await job_row_stats.record_gone(tx)
    [incident] = await stored.incidents()
    assert incident.closed_at == 5000.0 and "everything of the job" in (incident.resolution or "")


CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "decision": st.sampled_from(["stop", "replace the worker"]),
        "reason": st.just("another"),
        "steps_lost": st.integers(0, 9),
        "restored_step": st.integers(0, 9),
        "closed_at": st.floats(0, 1e6),
        "resolution": st.just("another"),
        "cause": st.sampled_from([cause.value for cause in Cause]),
        "opened_at": st.just(7.0),
        "attempt": st.integers(0, 3),
        "evidence": st.just(("more",)),
    },
)


@given(fault=st.sampled_from([AGENT_LOST, CRASH, HANG]), changes=CHANGES)
def test_nothing_else_of_a_closed_incident_ever_changes(
    fault: Fault, changes: dict[str, Any]
) -> None:
    before = IncidentRecord.of(closed(1, fault))
    after = with_late_evidence(before, replace(before, **changes))
    if after is None:
        assert {"opened_at", "attempt"} & changes.keys()
        return
    assert after.evidence[: len(before.evidence)] == before.evidence
    assert after.cause == before.cause or (before.cause, after.cause) == ("agent_lost", "node_lost")
    assert replace(after, evidence=before.evidence, cause=before.cause) == before


async def test_the_end_of_an_attempt_agrees_with_the_start_of_the_next(stored: StoredJob) -> None:
    stored.supervisor.form(1)
    stored.supervisor.emit(EventKind.ATTEMPT_ENDED, attempt=1, reason="died", last_step=41)
    await stored.report(rows=(row(1, 42), row(1, 43)), attempt=2)
    assert (await stored.attempts())[0].last_step == 43, "rows that came late"
    stored.supervisor.form(2)
    stored.supervisor.emit(
        EventKind.PROGRAM_RESUMED, attempt=2, restored_step=44, first_step=45, steps_lost=0
    )
    await stored.report()
    first, second = await stored.attempts()
    assert (first.last_step, second.restore.step, second.first_step) == (44, 44, 45)


@pytest.mark.parametrize("restored", [None, 90, 100])
async def test_an_attempt_started_from_the_state_that_its_program_tells(
    stored: StoredJob, restored: int | None
) -> None:
    offer = {"step": 100, "attempt": 1, "tiers": {"0": "own_ram"}, "sources": {"0": "n0"}}
    stored.supervisor.emit(
        EventKind.ATTEMPT_FORMING, attempt=2, mesh={}, world_size=1, members=[], restore=offer
    )
    await stored.report()
    [offered] = await stored.attempts()
    assert offered.restore.step == 100 and offered.restore.tiers
    first = 150 if restored is None else restored + 1
    stored.supervisor.emit(
        EventKind.PROGRAM_RESUMED, attempt=2, restored_step=restored, first_step=first
    )
    await stored.report()
    [told] = await stored.attempts()
    assert (told.restore.step, told.first_step) == (restored, first)
    assert told.restore.tiers == (offered.restore.tiers if restored == 100 else {})


async def test_what_a_start_waits_for_is_in_the_jobs_row_until_it_has_started(
    stored: StoredJob,
) -> None:
    def at(what: str) -> SupervisorReport:
        start = StartWait(what, since=10.0, until=130.0)
        return replace(stored.supervisor.report(Cursors()), start=start)

    stored.supervisor.phase = Phase.RECOVERING
    await stored.report(start=StartWait("ranks 0, 1 to join", 10.0, 130.0))
    job = await stored.record()
    assert job.waiting == {
        "resource": "start",
        "reason": "ranks 0, 1 to join",
        "since": 10.0,
        "until": 130.0,
    }
    assert not has_changes(job, at("ranks 0, 1 to join"), 5000.0)
    assert has_changes(job, at("rank 1 to join"), 5000.0)
    await stored.report()
    assert (await stored.record()).waiting is None


async def test_the_loss_that_is_shown_is_of_no_step_that_is_computed_again(
    stored: StoredJob,
) -> None:
    """The present attempt has begun before the last step of the one before."""

    async def shown(attempt: int, step: int, *rows: StepRow) -> tuple[int | None, float | None]:
        await stored.report(attempt=attempt, step=step, rows=rows)
        record = await stored.record()
        return record.step, record.loss

    assert await shown(1, 59, row(1, 58, loss=0.3), row(1, 59, loss=0.26)) == (59, 0.26)
    assert await shown(2, 59) == (59, 0.26), "it forms"
    assert await shown(2, 56) == (56, None)
    assert await shown(2, 56, row(2, 56, loss=0.29)) == (56, 0.29)
    assert await shown(2, 57) == (57, 0.29), "its row comes later"
    assert await shown(2, 57, row(2, 57, loss=0.28), row(2, 58, loss=0.27)) == (58, 0.27)
