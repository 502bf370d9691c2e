"""Statements that are looked at once, on both kinds of database."""

from __future__ import annotations

import pytest
from sqlalchemy import bindparam, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.services.jobs import JobService
from holdfast_service.store.engine import Store
from holdfast_service.store.models import Event, Job, MetricChunk, Outbox, RankChunk
from holdfast_service.store.statement import JOB, Put, Statement

KINDS = Statement(
    select(Event.seq, Event.kind, Event.data)
    .where(Event.job_id == JOB, Event.kind.in_(("job.submitted", "job.state")))
    .order_by(Event.seq)
)
ROWS = Statement(
    select(
        MetricChunk.attempt,
        MetricChunk.rows,
        MetricChunk.outline,
        MetricChunk.outline["last"].as_integer(),
    )
    .where(MetricChunk.job_id == JOB, MetricChunk.window >= bindparam("window"))
    .order_by(MetricChunk.attempt)
)
PUT = Put(MetricChunk)


@pytest.fixture
async def job(jobs: JobService) -> str:
    return (await jobs.submit({"name": "one"}))[0].id


async def put(session: AsyncSession, job: str, attempt: int, **rows: list[float]) -> None:
    outline = {"last": 7} if attempt > 1 else None
    await PUT.row(session, job_id=job, window=0, attempt=attempt, rows=rows, outline=outline)


async def test_its_rows_have_names_places_and_values_of_python(store: Store, job: str) -> None:
    async with store.read() as session:
        (row,) = await KINDS.all(session, job=job)
        whole = await Statement(select(Job).where(Job.id == JOB)).first(session, job=job)
    assert (row.seq, row.kind, row.data) == tuple(row) == (1, "job.submitted", {"name": "one"})
    assert whole is not None
    assert whole.spec["name"] == "one" and whole.cleaned is False and whole.waiting is None


async def test_nothing_there_is_none_and_no_rows(store: Store, job: str) -> None:
    async with store.read() as session:
        assert await ROWS.all(session, job=job, window=0) == []
        assert await ROWS.first(session, job=job, window=0) is None
        assert await ROWS.value(session, job=job, window=0) is None


async def test_a_row_is_put_anew_or_in_place_of_the_one_with_its_key(
    store: Store, job: str
) -> None:
    async with store.write() as session:
        await put(session, job, 1, a=[1.5])
        await put(session, job, 2, b=[2.5])
        assert await ROWS.values(session, job=job, window=0) == [1, 2]
        await put(session, job, 2, c=[3.5, 4.5])
    async with store.read() as session:
        found = [tuple(row) for row in await ROWS.all(session, job=job, window=0)]
    assert found == [(1, {"a": [1.5]}, None, None), (2, {"c": [3.5, 4.5]}, {"last": 7}, 7)]


async def test_bytes_and_lists_come_back_as_they_were(store: Store, job: str) -> None:
    columns = {"job_id": job, "place": 3, "width_s": 1, "ranks": 2, "counts": [0, 2]}
    async with store.write() as session:
        await Put(RankChunk).row(session, **columns, steps=b"\x00\xff", compute=b"")
    async with store.read() as session:
        row = await Statement(select(RankChunk).where(RankChunk.job_id == JOB)).first(
            session, job=job
        )
    assert row is not None
    assert row._asdict() == {**columns, "steps": b"\x00\xff", "compute": b""}


async def test_what_a_session_has_not_yet_written_is_seen_unless_it_says_no(
    store: Store, job: str
) -> None:
    async with store.write() as session:
        session.add(Event(job_id=job, seq=2, at=1.0, kind="job.state", data={"to": "QUEUED"}))
        with session.no_autoflush:
            assert len(await KINDS.all(session, job=job)) == 1
        assert len(await KINDS.all(session, job=job)) == 2


async def test_what_is_put_is_taken_back_with_its_transaction(store: Store, job: str) -> None:
    with pytest.raises(ZeroDivisionError):
        async with store.write() as session:
            await put(session, job, 1, a=[1.5])
            raise ZeroDivisionError
    async with store.read() as session:
        assert await ROWS.all(session, job=job, window=0) == []


async def test_errors_are_those_of_sqlalchemy(store: Store, job: str) -> None:
    nobody = "00000000-0000-7000-8000-000000000000"
    with pytest.raises(IntegrityError):
        async with store.write() as session:
            await put(session, nobody, 1, a=[1.5])
    with pytest.raises(KeyError):
        async with store.read() as session:
            await ROWS.all(session, job=job)
    async with store.read() as session:  # the connection is as good as before
        assert len(await KINDS.all(session, job=job)) == 1


async def test_each_kind_of_database_is_compiled_for_once(
    store: Store, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    statement = Statement(select(Outbox.id))
    async with store.read() as session:
        assert await statement.all(session) == []
        monkeypatch.setattr("holdfast_service.store.statement._compiled", None)
        assert await statement.all(session) == []
