"""A task may be cancelled anywhere in a transaction without leaving a lock behind."""

from __future__ import annotations

import asyncio
import random

import pytest
from sqlalchemy import func, select, update

from holdfast_service.store.engine import Store
from holdfast_service.store.models import JobRecord, Outbox
from holdfast_service.store.statement import Statement, Upsert

TIMES = 100
TIMEOUT_S = 60.0  # far below the time for which a transaction waits for a lock
_COUNT, _PUT = Statement(select(func.count(JobRecord.id))), Upsert(Outbox)


async def _reads_and_writes(store: Store) -> None:
    async with store.write() as session:
        await session.execute(select(func.count(JobRecord.id)))
        await session.execute(update(JobRecord).values(name="x"))
        await _COUNT.value(session)
        await _PUT.row(session, id="x", at=0.0, message={}, due_at=0.0, tries=0)


@pytest.mark.seconds
async def test_a_cancelled_transaction_leaves_no_lock(store: Store) -> None:
    rng = random.Random(0)
    for _ in range(TIMES):
        cancelled = asyncio.create_task(_reads_and_writes(store))
        for _ in range(rng.randrange(40)):
            await asyncio.sleep(rng.choice([0, 0, 0.0001, 0.0005]))
        cancelled.cancel()
        await asyncio.wait([cancelled])
        # `cancelled` still exists, and so does everything that its traceback refers to.
        await asyncio.wait_for(_reads_and_writes(store), TIMEOUT_S)
