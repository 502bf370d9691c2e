"""Who watches live gets everything once, in order, also across connections and servers."""

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

from holdfast_service.job_model.lifecycle import State
from holdfast_service.live import hub as live_hub
from holdfast_service.live import one_job, rows
from holdfast_service.live.hub import LiveHub
from holdfast_service.live.stream_cursor import Batch, Message, Position
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store import queries, series
from holdfast_service.store.engine import Store
from holdfast_service.store.models import Job
from holdfast_service.store.transaction import job_transaction
from holdfast_service.views.jobs import JobView


class Listener:
    """Collects what a stream tells."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    @property
    def cursor(self) -> Position:
        found = Position.of(self.messages[-1].position.cursor())
        assert found is not None
        return found

    def told(self, kind: str) -> list[Any]:
        return [json.loads(one.payload) for one in self.messages if one.kind == kind]

    async def until(self, met: Callable[[Listener], bool]) -> None:
        async with asyncio.timeout(20):
            while not met(self):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


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
        await listener.until(lambda one: bool(one.messages))
        yield listener
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await stream.aclose()  # type: ignore[attr-defined]


def hub_of(store: Store, settings: Settings, **changed: float) -> LiveHub:
    return LiveHub(store, settings.model_copy(update={"live_poll_s": 0.02, **changed}))


async def test_every_job_that_changes_is_told_to_everybody(
    store: Store, settings: Settings, jobs: JobService
) -> None:
    hub = hub_of(store, settings)
    old, _ = await jobs.submit({"name": "old"})
    async with listening(hub) as one, listening(hub) as other:
        assert one.messages[0].kind == "hello"
        new, _ = await jobs.submit({"name": "new"})
        await jobs.cancel(old.id)
        for listener in (one, other):
            await listener.until(lambda it: len(it.told("row")) >= 2)
            told = [(found["name"], found["state"]) for found in listener.told("row")]
            assert told == [("new", "QUEUED"), ("old", "CANCELLED")]
        assert hub.listeners == 2
        assert new.id == one.told("row")[0]["id"]
    assert hub.listeners == 0


async def test_the_drive_of_a_job_hears_that_somebody_looks_at_it(
    store: Store, settings: Settings, jobs: JobService
) -> None:
    hub = hub_of(store, settings)
    job, _ = await jobs.submit({"name": "x"})
    told: list[str] = []
    store.serving.on_watched = told.append
    async with listening(hub):
        assert not told
        async with listening(hub, job.id):
            async with listening(hub, job.id):
                pass
            assert store.serving.is_watched(job.id)
        assert not store.serving.is_watched(job.id)
    assert told == [job.id]


async def test_a_cut_stream_goes_on_without_a_gap_or_a_repeat(
    store: Store, settings: Settings, jobs: JobService
) -> None:
    hub = hub_of(store, settings)
    job, _ = await jobs.submit({"name": "x"})
    seen: list[int] = []
    cursor: Position | None = None
    for number in range(6):
        async with listening(hub, job.id, cursor) as listener:
            async with job_transaction(store, job.id) as tx:
                tx.emit("while.connected", {"n": number})
            await listener.until(
                lambda it: any(e["kind"] == "while.connected" for e in it.told("event"))
            )
            seen += [event["seq"] for event in listener.told("event")]
            cursor = listener.cursor
        async with job_transaction(store, job.id) as tx:
            tx.emit("while.cut", {"n": number})
    assert seen == list(range(2, seen[-1] + 1))
    assert seen[-1] >= 12


async def test_another_server_takes_a_stream_over(
    store: Store, settings: Settings, jobs: JobService
) -> None:
    job, _ = await jobs.submit({"name": "x"})
    other, _ = await jobs.submit({"name": "other"})
    async with listening(hub_of(store, settings), job.id) as first:
        async with job_transaction(store, job.id) as tx:
            tx.emit("one", {})
        await first.until(lambda it: bool(it.told("event")))
        cursor = first.cursor
    async with job_transaction(store, job.id) as tx:
        tx.emit("two", {})
        await series.store_rows(tx.session, job.id, [row(1, step) for step in (1, 2, 3)])
        tx.job.cursor_attempt, tx.job.cursor_step, tx.job.log_lines = 1, 3, 7
    await jobs.cancel(other.id)
    async with listening(hub_of(store, settings), job.id, cursor) as second:
        await second.until(lambda it: bool(it.told("logs")))
        assert [event["kind"] for event in second.told("event")] == ["two"]
        steps = [point["step"] for told in second.told("metrics") for point in told["points"]]
        assert steps == [1, 2, 3]
        assert second.told("logs") == [{"last_line": 7}]
        assert ("other", "CANCELLED") in [(r["name"], r["state"]) for r in second.told("row")]


async def test_one_job_is_told_in_full(store: Store, settings: Settings, jobs: JobService) -> None:
    hub = hub_of(store, settings)
    job, _ = await jobs.submit({"name": "x"})
    async with listening(hub, job.id) as listener:
        for step in (1, 2, 3):
            async with job_transaction(store, job.id) as tx:
                await series.store_rows(tx.session, job.id, [row(1, step)])
                tx.job.cursor_attempt, tx.job.cursor_step, tx.job.step = 1, step, step
        await jobs.pause(job.id)
        await listener.until(
            lambda it: any(told["state"] == State.PAUSED for told in it.told("job"))
        )
        points = [point for told in listener.told("metrics") for point in told["points"]]
        assert [point["step"] for point in points] == [1, 2, 3]
        assert listener.told("job")[-1]["progress"]["step"] == 3
        counted = ("row", "event", "metrics", "logs")
        cursors = [one.position.cursor() for one in listener.messages if one.kind in counted]
        assert len(set(cursors)) == len(cursors)


async def test_jobs_that_merely_advance_share_a_rate_and_changes_of_state_do_not(
    store: Store, settings: Settings, jobs: JobService
) -> None:
    hub = hub_of(store, settings, live_rows_per_s=1.0)
    ids = [(await jobs.submit({"name": f"j{n}"}))[0].id for n in range(10)]
    async with listening(hub) as listener:
        for step in range(1, 4):
            for one in ids:
                async with job_transaction(store, one) as tx:
                    tx.job.step = step
        await jobs.cancel(ids[4])
        await listener.until(
            lambda it: any(told["state"] == "CANCELLED" for told in it.told("row"))
        )
        assert len(listener.told("row")) < 8


async def test_a_database_that_is_away_for_a_while_silences_nobody(
    store: Store, settings: Settings, jobs: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_hub, "_WAKE_S", 0.02)
    hub = hub_of(store, settings)
    async with listening(hub) as listener:
        with monkeypatch.context() as away:
            away.setattr(store, "read", refuses)
            stop = asyncio.Event()
            beats = 0
            stream = hub._listen(None, None, stop, 0.05)
            async with asyncio.timeout(5):
                async for batch in stream:
                    beats += not batch.messages
                    if beats == 3:
                        stop.set()
        await jobs.submit({"name": "afterwards"})
        await listener.until(lambda it: [one["name"] for one in it.told("row")] == ["afterwards"])


def refuses() -> AsyncIterator[None]:
    raise ConnectionRefusedError("no database here")


async def test_a_job_that_cannot_be_shown_silences_no_other(
    store: Store, settings: Settings, jobs: JobService
) -> None:
    hub = hub_of(store, settings)
    bad, _ = await jobs.submit({"name": "bad"})
    good, _ = await jobs.submit({"name": "good"})
    async with listening(hub, bad.id) as of_bad, listening(hub, good.id) as of_good:
        async with job_transaction(store, bad.id) as tx:
            tx.job.waiting = {"of": "another version"}
        await jobs.cancel(good.id)
        await of_good.until(lambda it: bool(it.told("event")))
        async with job_transaction(store, bad.id) as tx:
            tx.job.waiting = None
        await of_bad.until(lambda it: bool(it.told("row")))
        await jobs.cancel(bad.id)
        await of_bad.until(lambda it: bool(it.told("job")))


async def test_what_happens_while_a_stream_begins_is_told(
    store: Store, settings: Settings, jobs: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = hub_of(store, settings)
    job, _ = await jobs.submit({"name": "x"})
    shown = queries.job_view

    async def shown_late(session: AsyncSession, of: Job) -> JobView:
        found = await shown(session, of)
        monkeypatch.setattr(queries, "job_view", shown)
        number = hub._rows.number
        async with job_transaction(store, job.id) as tx:
            tx.emit("meanwhile", {})
        async with asyncio.timeout(10):
            while hub._rows.number == number:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return found

    async with listening(hub):
        monkeypatch.setattr(queries, "job_view", shown_late)
        async with listening(hub, job.id) as listener:
            await listener.until(lambda it: bool(it.told("event")))
            assert listener.told("event")[0]["kind"] == "meanwhile"


async def test_a_job_that_could_not_be_read_is_read_again(
    store: Store, settings: Settings, jobs: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_job, "RETRY_S", 0.02)
    hub = hub_of(store, settings)
    job, _ = await jobs.submit({"name": "x"})
    shown = queries.job_view

    async def fails_once(_session: AsyncSession, _job: Job) -> JobView:
        monkeypatch.setattr(queries, "job_view", shown)
        raise ConnectionResetError

    async with listening(hub, job.id) as listener:
        await listener.until(lambda _: not hub._channels[job.id].dirty)
        monkeypatch.setattr(queries, "job_view", fails_once)
        async with job_transaction(store, job.id) as tx:
            tx.job.step = 7
        await listener.until(lambda it: bool(it.told("job")))
        assert listener.told("job")[-1]["progress"]["step"] == 7


async def test_who_missed_very_much_of_a_job_reads_it_anew(
    store: Store, settings: Settings, jobs: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_job, "CATCH_UP_POINTS", 500)
    hub = hub_of(store, settings)
    job, _ = await jobs.submit({"name": "x"})
    async with listening(hub, job.id) as first:
        cursor = first.cursor
    async with job_transaction(store, job.id) as tx:
        await series.store_rows(tx.session, job.id, [row(1, step) for step in range(1, 1201)])
        tx.job.cursor_attempt, tx.job.cursor_step = 1, 1200
    async with listening(hub, job.id, cursor) as second:
        assert len(second.told("metrics")) == 1
        assert len(second.told("reset")) == 1
        assert (second.cursor.attempt, second.cursor.step) == (1, 1200)


async def test_jobs_that_have_ended_are_not_remembered_for_ever(
    store: Store, settings: Settings, jobs: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "KEPT_ENDED", 2)
    hub = hub_of(store, settings)
    async with listening(hub) as listener:
        ids = [(await jobs.submit({"name": f"j{n}"}))[0].id for n in range(6)]
        for one in ids[:5]:
            await jobs.cancel(one)
        await listener.until(
            lambda it: (
                (ids[4], "CANCELLED") in [(row["id"], row["state"]) for row in it.told("row")]
            )
        )
        assert sorted(hub._rows.known) == sorted([*ids[3:5], ids[5]])


async def test_more_than_one_look_may_read_is_read_by_several(
    store: Store, settings: Settings, jobs: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MOST_AT_ONCE", 2)
    hub = hub_of(store, settings)
    ids = [(await jobs.submit({"name": f"j{n}"}))[0].id for n in range(7)]
    async with listening(hub) as listener:
        async with store.write() as session:  # all with one number
            await session.execute(update(Job).values(incidents=1))
        await listener.until(lambda it: len(it.told("row")) >= 7)
        assert sorted(one["id"] for one in listener.told("row")) == sorted(ids)


@pytest.mark.parametrize("settings", ["postgresql"], indirect=True)
async def test_a_position_is_below_all_that_waits_to_be_told(
    store: Store, settings: Settings, jobs: JobService
) -> None:
    hub = hub_of(store, settings, live_rows_per_s=1e-6)
    early, _ = await jobs.submit({"name": "early"})
    late, _ = await jobs.submit({"name": "x"})
    async with listening(hub) as listener:
        for one in (early, late):  # so that the hub knows them
            await jobs.pause(one.id)
        await listener.until(lambda it: len(it.told("row")) >= 2)
        async with job_transaction(store, early.id) as slow:
            slow.job.step = 1
            await slow.session.flush()
            async with job_transaction(store, late.id) as quick:
                quick.job.step = 1
            await listener.until(lambda _: len(hub._rows.pending) == 1)
        await listener.until(lambda _: len(hub._rows.pending) == 2)
        async with store.read() as session:
            numbers = await session.scalars(select(Job.changed))
        assert hub._rows.told_upto() < min(numbers)


@pytest.mark.parametrize("settings", ["postgresql"], indirect=True)
async def test_a_restored_database_tells_of_what_is_new(
    store: Store, settings: Settings, jobs: JobService
) -> None:
    old, _ = await jobs.submit({"name": "old"})
    async with store.write() as session:
        await session.execute(update(Job).values(changed=10**12))
    before = Position("elsewhere", 5, 10**12)
    restored = await Store.open(settings)
    try:
        async with restored.read() as session:
            assert list(await session.scalars(select(Job.changed))) == [0]
        async with listening(hub_of(restored, settings), None, before) as listener:
            assert len(listener.told("reset")) == 1
            await jobs.cancel(old.id)
            await listener.until(lambda it: len(it.told("row")) == 1)
    finally:
        await restored.close()


def test_what_is_no_cursor_is_known_as_such() -> None:
    here = Position("abc", 5, 7, "job", 1, 2, 3, 4)
    assert Position.of(here.cursor()) == here
    for cursor in ("", "1", "a.b.c.d.e.f.g.h", "a.1.2.j.-1.0.0.0", f"a.{'9' * 30}.1.j.0.0.0.0"):
        assert Position.of(cursor) is None


def test_a_batch_is_encoded_once() -> None:
    batch = Batch([Message("row", "{}", Position("h", 1, 2))])
    assert batch.encoded is batch.encoded
    assert batch.encoded == b"id: h.1.2.-.0.0.0.0\nevent: row\ndata: {}\n\n"
