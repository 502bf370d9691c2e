"""Claims on operations: each is carried out by one server, which another replaces if it dies.

A server claims an operation for `CLAIM_S` by the database's clock, under a new token, and renews
the claim with its progress. Every write of a server needs the token, so that a slow one that was
replaced, or whose operation was cancelled, changes nothing any more.
"""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

from sqlalchemy import ColumnElement, CursorResult, and_, delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.operations import ACTIVE, OperationKind, OperationState
from holdfast_service.store.engine import Store
from holdfast_service.store.models import Operation

CLAIM_S = 10.0


async def claim(store: Store, limit: int) -> list[Operation]:
    """Claim up to `limit` operations that wait, or whose server has died; the oldest first."""
    if limit <= 0:
        return []
    free = (
        select(Operation.id)
        .where(Operation.state.in_(ACTIVE), Operation.claimed_until <= store.clock())
        .order_by(Operation.id)
        .limit(limit)
    )
    async with store.read() as session:  # this takes no lock; SQLite has a single write lock
        if await session.scalar(free) is None:
            return []
    claimed = []
    async with store.write() as session:
        for operation_id in list(await session.scalars(free.with_for_update(skip_locked=True))):
            taken = await session.scalars(
                update(Operation)
                .where(Operation.id == operation_id)
                .values(
                    state=OperationState.RUNNING,
                    token=str(uuid4()),
                    claimed_until=store.clock() + CLAIM_S,
                    started_at=time.time(),
                    starts=Operation.starts + 1,
                    done_bytes=0,
                )
                .returning(Operation)
                .execution_options(synchronize_session=False)
            )
            claimed += list(taken)
    return claimed


async def renew(store: Store, operation: Operation, done_bytes: int, total: int | None) -> bool:
    """Store the progress and prolong the claim. False: it was cancelled, or is another server's."""
    async with store.write() as session:
        return await _change(
            session,
            operation,
            {
                "done_bytes": done_bytes,
                "total_bytes": total,
                "claimed_until": store.clock() + CLAIM_S,
            },
        )


async def give_back(store: Store, operation: Operation) -> None:
    """Another server, or the next one, may start it at once; this start does not count."""
    async with store.write() as session:
        await _change(
            session,
            operation,
            {
                "state": OperationState.PENDING,
                "claimed_until": 0.0,
                "starts": Operation.starts - 1,
            },
        )


async def finish(session: AsyncSession, operation: Operation, **values: Any) -> bool:
    """End the operation in the transaction of its effect. False: as in :func:`renew`; then the
    effect must not be stored either."""
    return await _change(session, operation, {"ended_at": time.time(), **values})


async def record(session: AsyncSession, operation: Operation, **values: Any) -> bool:
    """Store a part of the result in the transaction of its effect. False: as in :func:`finish`."""
    return await _change(session, operation, values)


async def cancel(session: AsyncSession, operation_id: str, expires_at: float) -> bool:
    """False: it has ended before. Its server learns of it with its next renewal."""
    result = await session.execute(
        update(Operation)
        .where(Operation.id == operation_id, Operation.state.in_(ACTIVE))
        .values(state=OperationState.CANCELLED, ended_at=time.time(), expires_at=expires_at)
        .execution_options(synchronize_session=False)
    )
    return _changed(result)


async def expire(store: Store, now: float) -> None:
    """Remove the operations that are kept no longer."""
    async with store.read() as session:
        over = select(Operation.id).where(Operation.expires_at < now).limit(1)
        if await session.scalar(over) is None:
            return
    async with store.write() as session:
        await session.execute(delete(Operation).where(Operation.expires_at < now))


async def tokens_of_exports(store: Store) -> set[str]:
    """The tokens whose files are being written, or may be fetched."""
    kept = (*ACTIVE, OperationState.SUCCEEDED)
    exports = select(Operation.token).where(
        Operation.kind == OperationKind.EXPORT, Operation.state.in_(kept)
    )
    async with store.read() as session:
        return {token for token in await session.scalars(exports) if token is not None}


async def _change(session: AsyncSession, operation: Operation, values: dict[str, Any]) -> bool:
    mine: ColumnElement[bool] = and_(
        Operation.id == operation.id,
        Operation.token == operation.token,
        Operation.state == OperationState.RUNNING,
    )
    change = update(Operation).where(mine).values(values)
    return _changed(await session.execute(change, execution_options={"synchronize_session": False}))


def _changed(result: Any) -> bool:
    assert isinstance(result, CursorResult)
    return bool(result.rowcount)
