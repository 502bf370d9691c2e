"""The operations on jobs that need no reconciler: submission, lists, streams of events."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.service.fake_cluster import FakeCluster, line

from holdfast_service.errors import (
    IdempotencyConflict,
    InvalidCursor,
    InvalidKey,
    InvalidSpec,
    JobEnded,
)
from holdfast_service.job_model.events.codec import UnknownEvent
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.log_filters import LogFilter
from holdfast_service.job_model.supervisor_protocol import (
    EventKind,
    Phase,
    SupervisorEvent,
    SupervisorReport,
)
from holdfast_service.services import jobs as job_service
from holdfast_service.services.jobs import JobService
from holdfast_service.services.overview import Overview
from holdfast_service.settings import Settings
from holdfast_service.store import projection, series
from holdfast_service.store.engine import Store
from holdfast_service.store.listing import Filters
from holdfast_service.store.models import JobRecord
from holdfast_service.store.transaction import job_transaction


async def test_a_submitted_job_is_queued_with_its_resolved_spec(jobs: JobService) -> None:
    job, created = await jobs.submit({"name": "x"})
    assert created
    assert (job.state, job.progress.steps, job.event_seq) == (State.QUEUED, 300, 1)
    assert job.spec["train"]["optimizer"]["lr"] == pytest.approx(3e-4)
    assert await jobs.get(job.id) == job


async def test_an_unreachable_cluster_does_not_prevent_a_submission(
    jobs: JobService, cluster: FakeCluster
) -> None:
    cluster.unreachable = True
    _, created = await jobs.submit({"name": "x"})
    assert created


async def test_an_invalid_spec_stores_nothing(jobs: JobService, overview: Overview) -> None:
    with pytest.raises(InvalidSpec):
        await jobs.submit({"name": "x", "parallel": {"dp_shard": 64}})
    assert (await overview.rows()).items == ()


async def test_the_same_idempotency_key_returns_the_same_job(jobs: JobService) -> None:
    first, created = await jobs.submit({"name": "x"}, "key")
    again, created_again = await jobs.submit({"name": "x"}, "key")
    assert (created, created_again, again.id) == (True, False, first.id)
    with pytest.raises(IdempotencyConflict):
        await jobs.submit({"name": "y"}, "key")
    with pytest.raises(InvalidKey):
        await jobs.submit({"name": "y"}, "k" * 256)


async def test_an_expired_key_names_a_new_job(
    store: Store, jobs: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = await jobs.submit({"name": "x"}, "key")
    async with store.read() as session:
        before = (await session.get_one(JobRecord, first.id)).changed
    with monkeypatch.context() as later:
        later.setattr(job_service, "KEEP_KEYS_S", 1e-6)
        second, created = await jobs.submit({"name": "y"}, "key")
    assert created and second.id != first.id
    async with store.read() as session:
        job = await session.get_one(JobRecord, first.id)
    assert (job.idempotency_key, job.changed) == (None, before), "users see no change"
    again, created = await jobs.submit({"name": "y"}, "key")
    assert (again.id, created) == (second.id, False)


async def test_concurrent_calls_with_one_key_create_one_job(jobs: JobService) -> None:
    answers = await asyncio.gather(*(jobs.submit({"name": "x"}, "key") for _ in range(8)))
    assert len({job.id for job, _ in answers}) == 1
    assert [created for _, created in answers].count(True) == 1


async def test_the_job_list_is_paged_by_cursor_newest_first(
    jobs: JobService, overview: Overview
) -> None:
    ids = [(await jobs.submit({"name": f"j{n % 2}"}))[0].id for n in range(5)]
    seen: list[str] = []
    cursor = None
    while True:
        page = await overview.rows(cursor=cursor, limit=2)
        seen += [job.id for job in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == ids[::-1]
    assert len((await overview.rows(Filters(name="j1"))).items) == 2
    chosen = await overview.rows(Filters(ids=frozenset(ids[:2])))
    assert {row.id for row in chosen.items} == set(ids[:2])
    await jobs.cancel(ids[0])
    cancelled = await overview.rows(Filters(states=frozenset({State.CANCELLED})))
    assert [job.id for job in cancelled.items] == [ids[0]]
    for cursor in ("", "x", "!" * 22, "ä"):
        with pytest.raises(InvalidCursor):
            await overview.rows(cursor=cursor)


async def test_an_ended_job_cannot_be_cancelled_but_a_cancelled_one_can(
    store: Store, jobs: JobService
) -> None:
    job, _ = await jobs.submit({"name": "x"})
    for _ in range(2):
        assert (await jobs.cancel(job.id)).state is State.CANCELLED
    failed, _ = await jobs.submit({"name": "x"})
    async with job_transaction(store, failed.id) as tx:
        tx.end(State.FAILED, "code", "message")
    with pytest.raises(JobEnded):
        await jobs.cancel(failed.id)
    assert (await jobs.get(failed.id)).desired == "running"


async def test_event_numbers_have_no_gaps_with_concurrent_writers(
    store: Store, jobs: JobService
) -> None:
    job, _ = await jobs.submit({"name": "x"})

    async def write(number: int) -> None:
        async with job_transaction(store, job.id) as tx:
            tx.emit(UnknownEvent("written", {"number": number}))
            if number % 3 == 0:
                tx.emit(UnknownEvent("written", {"number": -number}))

    await asyncio.gather(*(write(number) for number in range(12)))
    events = (await jobs.history.events(job.id)).items
    assert [event.seq for event in events] == list(range(1, 1 + 1 + 12 + 4))


async def test_a_failed_transaction_leaves_no_event_and_no_number(
    store: Store, jobs: JobService
) -> None:
    job, _ = await jobs.submit({"name": "x"})
    with pytest.raises(ZeroDivisionError):
        async with job_transaction(store, job.id) as tx:
            tx.transition(State.STARTING)
            raise ZeroDivisionError
    after = await jobs.get(job.id)
    assert (after.state, after.event_seq) == (State.QUEUED, 1)


async def test_logs_are_filtered_followed_and_tailed(store: Store, jobs: JobService) -> None:
    job, _ = await jobs.submit({"name": "x"})
    lines = [line(seq, f"{seq}", rank=seq % 2, attempt=1 + seq // 900) for seq in range(1, 1201)]
    async with store.write() as session:
        owner = await session.get_one(JobRecord, job.id)
        for start in range(0, 1200, 400):
            part = lines[start : start + 400]
            assert await series.store_logs(session, owner, part) == 400
            assert await series.store_logs(session, owner, part) == 0
    seen: list[str] = []
    last, more = 0, True
    while more:
        page = await jobs.log_reader.page(job.id, LogFilter(rank=1), after=last, limit=100)
        seen += [entry.text for entry in page.items]
        last, more = page.last_line, page.next_cursor is not None
    assert seen == [str(seq) for seq in range(1, 1201, 2)]
    assert last == 1200
    tail = await jobs.log_reader.page(job.id, LogFilter(rank=0), tail=3)
    assert ([entry.text for entry in tail.items], tail.last_line) == (
        ["1196", "1198", "1200"],
        1200,
    )
    page = await jobs.log_reader.page(job.id, LogFilter(attempt=2), limit=1)
    assert page.items[0].text == "900"


async def test_a_rollback_is_reported_and_its_steps_may_have_new_digests(
    store: Store, jobs: JobService
) -> None:
    job, _ = await jobs.submit({"name": "x"})
    finding = {
        **{"attempt": 1, "kind": "nonfinite", "step": 6, "window": 5, "value": None, "loss": None},
        **{"grad_norm": None, "middle": None, "limit": None, "ranks": [2], "micro_batch": 1},
        **{"layer": "blocks.1", "what": "output", "decision": "rollback", "why": "loss nan"},
        **{"skipped": [4, 6], "back_to": 4, "ledger": [[4, 6]]},
    }
    tripped = SupervisorEvent(1, 5.0, EventKind.GUARD_TRIPPED, finding)
    old = {step: f"old{step}" for step in range(1, 6)}
    for events, digests in (((), old), ((tripped,), {4: "old4", 5: "new5"})):
        report = SupervisorReport(1, Phase.STARTING, 0, 1, events=events, digests=digests)
        async with job_transaction(store, job.id) as tx:
            await projection.store_report(tx, report, Settings().quarantine_rules, hold_end=False)
    guards = (await jobs.get(job.id)).guards
    assert (guards.trips, guards.ledger) == (1, ((4, 6),))
    assert (guards.recent[0].ranks, guards.recent[0].layer) == ((2,), "blocks.1")
    kinds = [event.kind for event in (await jobs.history.events(job.id)).items]
    assert "guard.tripped" in kinds
    assert "digest.mismatch" not in kinds
    assert "event.unreadable" not in kinds
