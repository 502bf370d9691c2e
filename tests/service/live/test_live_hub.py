"""A live listener gets every message once and in order, across connections and servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession
from tests.support.service.fake_cluster import row
from tests.support.service.job_drives import until
from tests.support.waiting import DEADLINE_S

from holdfast_service.job_model.events.codec import UnknownEvent
from holdfast_service.job_model.lifecycle import State
from holdfast_service.live import changed_jobs, job_channel, rows
from holdfast_service.live import hub as live_hub
from holdfast_service.live.followers import JobFeed
from holdfast_service.live.hub import LiveHub
from holdfast_service.live.rows import ROWS_PER_S
from holdfast_service.live.stream_cursor import Batch, JobPosition, Position, StreamMessage
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store import queries, series
from holdfast_service.store.engine import Store
from holdfast_service.store.models import JobRecord
from holdfast_service.store.transaction import job_transaction
from holdfast_service.views.jobs import JobView


class Listener:
    """Collects the messages of a stream."""

    def __init__(self) -> None:
        self.messages: list[StreamMessage] = []

    @property
    def cursor(self) -> Position:
        found = Position.parse(self.messages[-1].position.cursor())
        assert found is not None
        return found

    def received(self, kind: str) -> list[Any]:
        return [json.loads(message.payload) for message in self.messages if message.kind == kind]

    async def until(self, met: Callable[[Listener], bool]) -> None:
        await until(lambda: met(self))


@asynccontextmanager
async def listening(
    hub: LiveHub, job: str | None = None, cursor: Position | None = None
) -> AsyncIterator[Listener]:
    listener = Listener()
    stream = await hub.listen(job, cursor, asyncio.Event(), 30.0)

    async def listen() -> None:
        async for batch in stream:
            listener.messages += batch.messages

    task = asyncio.create_task(listen())
    try:
        await listener.until(lambda it: bool(it.messages))
        yield listener
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await stream.aclose()  # type: ignore[attr-defined]


def hub_of(store: Store, rows_per_s: float = ROWS_PER_S) -> LiveHub:
    return LiveHub(store, poll_s=0.02, rows_per_s=rows_per_s)


async def test_every_changed_job_is_sent_to_every_listener(store: Store, jobs: JobService) -> None:
    hub = hub_of(store)
    old, _ = await jobs.submit({"name": "old"})
    async with listening(hub) as first, listening(hub) as second:
        assert first.messages[0].kind == "hello"
        new, _ = await jobs.submit({"name": "new"})
        await jobs.cancel(old.id)
        for listener in (first, second):
            await listener.until(lambda it: len(it.received("row")) >= 2)
            states = [(found["name"], found["state"]) for found in listener.received("row")]
            assert states == [("new", "QUEUED"), ("old", "CANCELLED")]
        assert hub.listeners == 2
        assert new.id == first.received("row")[0]["id"]
    assert hub.listeners == 0


async def test_one_poll_serves_followers_and_listeners_while_there_are_any(
    store: Store, jobs: JobService
) -> None:
    hub = hub_of(store)
    job, _ = await jobs.submit({"name": "x"})
    async with hub.following(job.id, JobFeed.EVENTS) as followed:
        poll, first = hub._poll_task, followed.round
        async with listening(hub) as listener:
            await jobs.cancel(job.id)
            await listener.until(lambda it: bool(it.received("row")))
        assert first.ended.done()
        assert hub._poll_task is poll is not None
    assert hub._poll_task is None


async def test_a_poll_that_ended_is_started_again(store: Store, jobs: JobService) -> None:
    hub = hub_of(store)
    job, _ = await jobs.submit({"name": "x"})
    async with hub.following(job.id, JobFeed.EVENTS):
        assert hub._poll_task is not None
        hub._poll_task.cancel()
        await asyncio.wait([hub._poll_task])
        async with listening(hub) as listener:
            await jobs.cancel(job.id)
            await listener.until(lambda it: bool(it.received("row")))


async def test_the_first_listener_of_a_job_triggers_the_watch_callback(
    store: Store, jobs: JobService
) -> None:
    hub = hub_of(store)
    job, _ = await jobs.submit({"name": "x"})
    watched: list[str] = []
    store.watched_jobs.on_watch_started = watched.append
    async with listening(hub):
        assert not watched
        async with listening(hub, job.id):
            async with listening(hub, job.id):
                pass
            assert store.watched_jobs.is_watched(job.id)
        assert not store.watched_jobs.is_watched(job.id)
    assert watched == [job.id]


async def test_a_reconnected_stream_has_no_gaps_or_repeats(store: Store, jobs: JobService) -> None:
    hub = hub_of(store)
    job, _ = await jobs.submit({"name": "x"})
    seen: list[int] = []
    cursor: Position | None = None
    for number in range(6):
        async with listening(hub, job.id, cursor) as listener:
            async with job_transaction(store, job.id) as tx:
                tx.emit(UnknownEvent("while.connected", {"n": number}))
            await listener.until(
                lambda it: any(e["kind"] == "while.connected" for e in it.received("event"))
            )
            seen += [event["seq"] for event in listener.received("event")]
            cursor = listener.cursor
        async with job_transaction(store, job.id) as tx:
            tx.emit(UnknownEvent("while.cut", {"n": number}))
    assert seen == list(range(2, seen[-1] + 1))
    assert seen[-1] >= 12


async def test_a_stream_continues_on_another_server(store: Store, jobs: JobService) -> None:
    job, _ = await jobs.submit({"name": "x"})
    other, _ = await jobs.submit({"name": "other"})
    async with listening(hub_of(store), job.id) as first:
        async with job_transaction(store, job.id) as tx:
            tx.emit(UnknownEvent("one", {}))
        await first.until(lambda it: bool(it.received("event")))
        cursor = first.cursor
    async with job_transaction(store, job.id) as tx:
        tx.emit(UnknownEvent("two", {}))
        await series.store_rows(tx.session, job.id, [row(1, step) for step in (1, 2, 3)])
        tx.job.cursor_attempt, tx.job.cursor_step, tx.job.log_lines = 1, 3, 7
    await jobs.cancel(other.id)
    async with listening(hub_of(store), job.id, cursor) as second:
        await second.until(lambda it: bool(it.received("logs")))
        assert [event["kind"] for event in second.received("event")] == ["two"]
        steps = [
            point["step"] for metrics in second.received("metrics") for point in metrics["points"]
        ]
        assert steps == [1, 2, 3]
        assert second.received("logs") == [{"last_line": 7}]
        assert ("other", "CANCELLED") in [(r["name"], r["state"]) for r in second.received("row")]


@pytest.mark.seconds
async def test_a_job_stream_sends_all_parts_of_the_job(store: Store, jobs: JobService) -> None:
    hub = hub_of(store)
    job, _ = await jobs.submit({"name": "x"})
    async with listening(hub, job.id) as listener:
        for step in (1, 2, 3):
            async with job_transaction(store, job.id) as tx:
                await series.store_rows(tx.session, job.id, [row(1, step)])
                tx.job.cursor_attempt, tx.job.cursor_step, tx.job.step = 1, step, step
        await jobs.pause(job.id)
        await listener.until(
            lambda it: any(job["state"] == State.PAUSED for job in it.received("job"))
        )
        points = [point for metrics in listener.received("metrics") for point in metrics["points"]]
        assert [point["step"] for point in points] == [1, 2, 3]
        assert listener.received("job")[-1]["progress"]["step"] == 3
        counted = ("row", "event", "metrics", "logs")
        cursors = [
            message.position.cursor() for message in listener.messages if message.kind in counted
        ]
        assert len(set(cursors)) == len(cursors)


async def test_progress_rows_are_rate_limited_and_state_changes_are_not(
    store: Store, jobs: JobService
) -> None:
    hub = hub_of(store, rows_per_s=1.0)
    ids = [(await jobs.submit({"name": f"j{n}"}))[0].id for n in range(10)]
    async with listening(hub) as listener:
        for step in range(1, 4):
            for job_id in ids:
                async with job_transaction(store, job_id) as tx:
                    tx.job.step = step
        await jobs.cancel(ids[4])
        await listener.until(
            lambda it: any(row["state"] == "CANCELLED" for row in it.received("row"))
        )
        assert len(listener.received("row")) < 8


async def test_streams_survive_a_database_outage(
    store: Store, jobs: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_hub, "_WAKE_S", 0.02)
    hub = hub_of(store)
    async with listening(hub) as listener:
        with monkeypatch.context() as outage:
            outage.setattr(store, "read", refuses)
            stop = asyncio.Event()
            beats = 0
            stream = hub._listen(None, None, stop, 0.05)
            async with asyncio.timeout(DEADLINE_S):
                async for batch in stream:
                    beats += not batch.messages
                    if beats == 3:
                        stop.set()
        await jobs.submit({"name": "afterwards"})
        await listener.until(
            lambda it: [row["name"] for row in it.received("row")] == ["afterwards"]
        )


def refuses() -> AsyncIterator[None]:
    raise ConnectionRefusedError("no database here")


@pytest.mark.seconds
async def test_an_unreadable_job_does_not_affect_other_jobs(store: Store, jobs: JobService) -> None:
    hub = hub_of(store)
    bad, _ = await jobs.submit({"name": "bad"})
    good, _ = await jobs.submit({"name": "good"})
    async with listening(hub, bad.id) as of_bad, listening(hub, good.id) as of_good:
        async with job_transaction(store, bad.id) as tx:
            tx.job.waiting = {"of": "another version"}
        await jobs.cancel(good.id)
        await of_good.until(lambda it: bool(it.received("event")))
        async with job_transaction(store, bad.id) as tx:
            tx.job.waiting = None
        await of_bad.until(lambda it: bool(it.received("row")))
        await jobs.cancel(bad.id)
        await of_bad.until(lambda it: bool(it.received("job")))


async def test_events_during_the_start_of_a_stream_are_sent(
    store: Store, jobs: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = hub_of(store)
    job, _ = await jobs.submit({"name": "x"})
    shown = queries.job_view

    async def shown_late(session: AsyncSession, of: JobRecord) -> JobView:
        found = await shown(session, of)
        monkeypatch.setattr(queries, "job_view", shown)
        number = hub._job_rows.number
        async with job_transaction(store, job.id) as tx:
            tx.emit(UnknownEvent("meanwhile", {}))
        await until(lambda: hub._job_rows.number > number)
        return found

    async with listening(hub):
        monkeypatch.setattr(queries, "job_view", shown_late)
        async with listening(hub, job.id) as listener:
            await listener.until(lambda it: bool(it.received("event")))
            assert listener.received("event")[0]["kind"] == "meanwhile"


@pytest.mark.seconds
async def test_a_failed_read_of_a_job_is_retried(
    store: Store, jobs: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_channel, "RETRY_S", 0.02)
    hub = hub_of(store)
    job, _ = await jobs.submit({"name": "x"})
    shown = queries.job_view

    async def fails_once(_session: AsyncSession, _job: JobRecord) -> JobView:
        monkeypatch.setattr(queries, "job_view", shown)
        raise ConnectionResetError

    async with listening(hub, job.id) as listener:
        await listener.until(lambda _: not hub._channels[job.id].dirty)
        monkeypatch.setattr(queries, "job_view", fails_once)
        async with job_transaction(store, job.id) as tx:
            tx.job.step = 7
        await listener.until(lambda it: bool(it.received("job")))
        assert listener.received("job")[-1]["progress"]["step"] == 7


async def test_a_listener_far_behind_gets_a_reset(
    store: Store, jobs: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_channel, "MAX_CATCH_UP_POINTS", 500)
    hub = hub_of(store)
    job, _ = await jobs.submit({"name": "x"})
    async with listening(hub, job.id) as first:
        cursor = first.cursor
    async with job_transaction(store, job.id) as tx:
        await series.store_rows(tx.session, job.id, [row(1, step) for step in range(1, 1201)])
        tx.job.cursor_attempt, tx.job.cursor_step = 1, 1200
    async with listening(hub, job.id, cursor) as second:
        assert len(second.received("metrics")) == 1
        assert len(second.received("reset")) == 1
        assert (second.cursor.at.attempt, second.cursor.at.step) == (1, 1200)


async def test_remembered_ended_jobs_are_bounded(
    store: Store, jobs: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_ENDED_KEPT", 2)
    hub = hub_of(store)
    async with listening(hub) as listener:
        ids = [(await jobs.submit({"name": f"j{n}"}))[0].id for n in range(6)]
        for job_id in ids[:5]:
            await jobs.cancel(job_id)
        await listener.until(
            lambda it: (
                (ids[4], "CANCELLED") in [(row["id"], row["state"]) for row in it.received("row")]
            )
        )
        assert sorted(hub._job_rows.known) == sorted([*ids[3:5], ids[5]])


async def test_more_rows_than_the_poll_limit_are_read_by_several_polls(
    store: Store, jobs: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed_jobs, "MAX_ROWS_PER_POLL", 2)
    hub = hub_of(store)
    ids = [(await jobs.submit({"name": f"j{n}"}))[0].id for n in range(7)]
    async with listening(hub) as listener:
        async with store.write() as session:  # all rows get the same change number
            await session.execute(update(JobRecord).values(incidents=1))
        await listener.until(lambda it: len(it.received("row")) >= 7)
        assert sorted(row["id"] for row in listener.received("row")) == sorted(ids)


@pytest.mark.parametrize("settings", ["postgresql"], indirect=True)
async def test_a_position_is_below_all_pending_rows(store: Store, jobs: JobService) -> None:
    hub = hub_of(store, rows_per_s=1e-6)
    early, _ = await jobs.submit({"name": "early"})
    late, _ = await jobs.submit({"name": "x"})
    async with listening(hub) as listener:
        for job in (early, late):  # so that the hub knows both jobs
            await jobs.pause(job.id)
        await listener.until(lambda it: len(it.received("row")) >= 2)
        async with job_transaction(store, early.id) as slow:
            slow.job.step = 1
            await slow.session.flush()
            async with job_transaction(store, late.id) as quick:
                quick.job.step = 1
            await listener.until(lambda _: len(hub._job_rows.pending) == 1)
        await listener.until(lambda _: len(hub._job_rows.pending) == 2)
        async with store.read() as session:
            numbers = await session.scalars(select(JobRecord.changed))
        assert hub._job_rows.sent_below() <= min(numbers)


@pytest.mark.parametrize("settings", ["postgresql"], indirect=True)
async def test_a_restored_database_sends_new_changes(
    store: Store, settings: Settings, jobs: JobService
) -> None:
    old, _ = await jobs.submit({"name": "old"})
    async with store.write() as session:
        await session.execute(update(JobRecord).values(changed=10**12))
    before = Position("elsewhere", 5, 10**12)
    restored = await Store.open(settings)
    try:
        async with restored.read() as session:
            assert list(await session.scalars(select(JobRecord.changed))) == [0]
        async with listening(hub_of(restored), None, before) as listener:
            assert len(listener.received("reset")) == 1
            await jobs.cancel(old.id)
            await listener.until(lambda it: len(it.received("row")) == 1)
    finally:
        await restored.close()


def test_an_invalid_cursor_is_rejected() -> None:
    here = Position("abc", 5, 7, "job", JobPosition(1, 2, 3, 4))
    assert Position.parse(here.cursor()) == here
    for cursor in ("", "1", "a.b.c.d.e.f.g.h", "a.1.2.j.-1.0.0.0", f"a.{'9' * 30}.1.j.0.0.0.0"):
        assert Position.parse(cursor) is None


def test_a_batch_is_encoded_once() -> None:
    batch = Batch([StreamMessage("row", "{}", Position("h", 1, 2))])
    assert batch.encoded is batch.encoded
    assert batch.encoded == b"id: h.1.2.-.0.0.0.0\nevent: row\ndata: {}\n\n"
