"""Queries and upserts of whole rows, on both databases."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import bindparam, event, select
from sqlalchemy.engine.interfaces import CacheStats
from sqlalchemy.exc import IntegrityError, StatementError
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.services.jobs import JobService
from holdfast_service.store.engine import Store
from holdfast_service.store.models import Event, MetricChunk
from holdfast_service.store.statement import JOB, Statement, Upsert

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
PUT = Upsert(MetricChunk)


@pytest.fixture
async def job(jobs: JobService) -> str:
    return (await jobs.submit({"name": "one"}))[0].id


async def put(session: AsyncSession, job: str, attempt: int, **rows: list[float]) -> None:
    outline = {"last": 7} if attempt > 1 else None
    await PUT.row(session, job_id=job, window=0, attempt=attempt, rows=rows, outline=outline)


async def test_an_empty_result_is_none_or_no_rows(store: Store, job: str) -> None:
    async with store.read() as session:
        assert await ROWS.all(session, job=job, window=0) == []
        assert await ROWS.first(session, job=job, window=0) is None
        assert await ROWS.value(session, job=job, window=0) is None


async def test_an_upsert_inserts_or_replaces_the_row_with_its_key(store: Store, job: str) -> None:
    async with store.write() as session:
        await put(session, job, 1, a=[1.5])
        await put(session, job, 2, b=[2.5])
        assert await ROWS.values(session, job=job, window=0) == [1, 2]
        await put(session, job, 2, c=[3.5, 4.5])
    async with store.read() as session:
        found = [tuple(row) for row in await ROWS.all(session, job=job, window=0)]
    assert found == [(1, {"a": [1.5]}, None, None), (2, {"c": [3.5, 4.5]}, {"last": 7}, 7)]


async def test_pending_writes_are_flushed_unless_autoflush_is_off(store: Store, job: str) -> None:
    async with store.write() as session:
        session.add(Event(job_id=job, seq=2, at=1.0, kind="job.state", data={"to": "QUEUED"}))
        with session.no_autoflush:
            assert len(await KINDS.all(session, job=job)) == 1
        assert len(await KINDS.all(session, job=job)) == 2


async def test_errors_are_wrapped_as_sqlalchemy_errors(store: Store, job: str) -> None:
    missing_job = "00000000-0000-7000-8000-000000000000"
    with pytest.raises(IntegrityError):
        async with store.write() as session:
            await put(session, missing_job, 1, a=[1.5])
    with pytest.raises(StatementError, match="'window'"):
        async with store.read() as session:
            await ROWS.all(session, job=job)
    async with store.read() as session:  # the connection is still usable
        assert len(await KINDS.all(session, job=job)) == 1


async def test_statements_are_compiled_once(store: Store, job: str) -> None:
    compiled: list[str] = []

    def executed(
        _connection: Any, _cursor: Any, text: str, _values: Any, context: Any, _many: bool
    ) -> None:
        if context.cache_hit is not CacheStats.CACHE_HIT:
            compiled.append(text)

    for _ in range(2):
        compiled.clear()
        event.listen(store._engine.sync_engine, "before_cursor_execute", executed)
        async with store.write() as session:
            await put(session, job, 1, a=[1.5])
            await KINDS.all(session, job=job)
            await ROWS.all(session, job=job, window=0)
        event.remove(store._engine.sync_engine, "before_cursor_execute", executed)
    assert not [text for text in compiled if text.startswith(("SELECT", "INSERT"))]
