"""Leases: they assign each job and each operation to one holder, by the database's clock.

A holder (`lease_holder.py`) keeps one expiry time for all the rows that it holds and renews it
periodically. When the holder dies, the time runs out and others take its rows with new tokens. The
token, not the time, guards every write: a slow holder finds its token replaced and stops.

A row is free if its owner is not among the living: expired, or forgotten. Only a renewal brings
an owner to life. An owner locks its own row while it claims or renews, and a claim takes rows only
from owners whose rows it has locked or which have none: a transaction that commits late is never
overtaken.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

from sqlalchemy import (
    ColumnElement,
    Select,
    Update,
    and_,
    case,
    delete,
    exists,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.store.engine import Store
from holdfast_service.store.models import JobRecord, Leased, LeaseOwner, Operation

MAX_CLAIMED = 200
LOOKUP_BATCH = 500
_TABLES: tuple[type[Leased], ...] = (JobRecord, Operation)

Row = TypeVar("Row", bound=Leased)


class LeaseLost(Exception):
    """Another holder works on the row now, or its work is over: the writer must stop."""


@dataclass(frozen=True)
class RowLease:
    id: str  # of the row
    token: str


async def lock(
    session: AsyncSession, table: type[Row], row_id: str, token: str | None = None
) -> Row | None:
    """The row, which nobody else changes before the transaction ends. `token`: of the lease under
    which it will be changed. Raises LeaseLost if it is not the row's."""
    row = await session.scalar(select(table).where(table.id == row_id).with_for_update())
    if row is not None and token is not None and row.lease_token != token:
        raise LeaseLost(row_id)
    return row


async def claim(store: Store, table: type[Leased], owner: str, limit: int) -> list[RowLease]:
    """Claim up to `limit` rows (at most `MAX_CLAIMED`) that have work left, are due, and have no
    live holder. Claims nothing if the owner itself is not alive: it must renew first, and learns
    which rows it has lost."""
    if limit <= 0:
        return []
    living = select(LeaseOwner.id).where(LeaseOwner.until > store.clock())
    async with store.read() as session:
        # This check takes no lock; SQLite has a single write lock.
        candidates = select(table.id).where(_is_due(store, table), _is_free(table, living)).limit(1)
        if await session.scalar(candidates) is None:
            return []
    token = str(uuid4())
    async with store.write() as session:
        # Locked until the commit: no other claim finds this owner dead meanwhile.
        if not await session.scalar(_is_alive(store, owner)):
            return []
        # A row that is locked belongs to an owner whose claim or renewal is about to commit.
        expired = select(LeaseOwner.id).where(
            LeaseOwner.until <= store.clock(), LeaseOwner.id != owner
        )
        dead = list(await session.scalars(expired.with_for_update(skip_locked=True)))
        living = select(LeaseOwner.id).where(LeaseOwner.id.not_in(dead))
        due = (
            select(table.id)
            .where(_is_due(store, table), _is_free(table, living))
            .order_by(*table.claim_order())
            .limit(min(limit, MAX_CLAIMED))
            .with_for_update(skip_locked=True)
        )
        locked = list(await session.scalars(due))
        taken = await session.scalars(
            _update(
                table,
                lease_owner=owner,
                lease_token=token,
                due_at=store.clock(),  # a later 0 means that a user command needs handling
            )
            # Checked again, now that the row cannot change: a claim, and the row of its owner, may
            # have been committed since the previous statement began.
            .where(table.id.in_(locked), _is_free(table, living))
            .returning(table.id)
        )
        leases = [RowLease(row_id, token) for row_id in sorted(taken)]
        await _delete_idle_owners(session, dead)
        return leases


async def renew(
    store: Store, table: type[Leased], owner: str, ids: Collection[str], lease_s: float
) -> set[str]:
    """Renew the leases of `owner`; returns the rows that it still holds."""
    async with store.write() as session:
        in_time = await session.scalar(_is_alive(store, owner))
        insert = (postgresql.insert if store.postgres else sqlite.insert)(LeaseOwner)
        upsert = insert.values(id=owner, until=store.clock() + lease_s)
        await session.execute(
            upsert.on_conflict_do_update(
                index_elements=[LeaseOwner.id], set_={"until": upsert.excluded.until}
            )
        )
        return set(ids) if in_time else await _still_held(session, table, owner, ids)


async def release(store: Store, table: type[Leased], lease: RowLease, due_in_s: float) -> bool:
    """Release the row; it is due again after `due_in_s`, or at once if a user command arrived since
    it was claimed: then True. Does nothing if the lease is lost, or the row finished."""
    later = case((table.due_at == 0.0, 0.0), else_=store.clock() + due_in_s)
    async with store.write() as session:
        commanded = await session.scalar(
            _update(table, lease_owner=None, lease_token=None, due_at=later)
            .where(table.unfinished(), table.id == lease.id, table.lease_token == lease.token)
            .returning(table.due_at == 0.0)
        )
        return bool(commanded)


async def commanded(store: Store, owner: str) -> dict[str, tuple[int, int]]:
    """The jobs of `owner` that got a user's command since their claim, with the numbers of the
    newest: of changes, and of injected faults."""
    columns = (JobRecord.id, JobRecord.generation, JobRecord.faults_wanted)
    mine = (JobRecord.unfinished(), JobRecord.lease_owner == owner, JobRecord.due_at == 0.0)
    async with store.read() as session:
        rows = await session.execute(select(*columns).where(*mine))
        return {job_id: (changes, faults) for job_id, changes, faults in rows}


async def idle(
    store: Store, table: type[Leased], owner: str, busy: Collection[str]
) -> set[RowLease]:
    """The leases that `owner` holds on rows that it does not work on: the answer to its claim was
    lost, or a release failed."""
    mine = and_(table.unfinished(), table.lease_owner == owner)
    async with store.read(long=True) as session:
        held = await session.scalar(select(func.count()).select_from(table).where(mine))
        if not held or held <= len(busy):
            return set()
        rows = await session.execute(select(table.id, table.lease_token).where(mine))
        return {RowLease(row_id, token or "") for row_id, token in rows if row_id not in busy}


async def leave(store: Store, owner: str) -> None:
    """Expire `owner`, so that others may claim its rows at once."""
    async with store.write() as session:
        await session.execute(
            update(LeaseOwner)
            .where(LeaseOwner.id == owner)
            .values(until=store.clock())
            .execution_options(synchronize_session=False)
        )
        await _delete_idle_owners(session, [owner])


async def _still_held(
    session: AsyncSession, table: type[Leased], owner: str, ids: Collection[str]
) -> set[str]:
    """The rows of an expired owner that no other holder has taken, or is about to take."""
    ordered = sorted(ids)
    kept: set[str] = set()
    for start in range(0, len(ordered), LOOKUP_BATCH):
        batch = ordered[start : start + LOOKUP_BATCH]
        held = select(table.id).where(table.lease_owner == owner, table.id.in_(batch))
        kept |= set(await session.scalars(held.order_by(table.id).with_for_update()))
    return kept


async def _delete_idle_owners(session: AsyncSession, owners: list[str]) -> None:
    """Delete the given owners, except those that still hold unfinished rows."""
    if owners:
        holding = (
            exists().where(table.unfinished(), table.lease_owner == LeaseOwner.id)
            for table in _TABLES
        )
        await session.execute(delete(LeaseOwner).where(LeaseOwner.id.in_(owners), ~or_(*holding)))


def _update(table: type[Leased], **values: Any) -> Update:
    """Leases are not visible to users: a job keeps its change number."""
    unchanged = {"changed": JobRecord.changed} if table is JobRecord else {}
    changes = update(table).values(**values, **unchanged)
    return changes.execution_options(synchronize_session=False)


def _is_alive(store: Store, owner: str) -> Select[bool]:
    """Locks the owner's row; no row: the owner is new, or was forgotten."""
    alive = select(LeaseOwner.until > store.clock()).where(LeaseOwner.id == owner)
    return alive.with_for_update()


def _is_due(store: Store, table: type[Leased]) -> ColumnElement[bool]:
    return and_(table.unfinished(), table.due_at <= store.clock())


def _is_free(table: type[Leased], living: Select[str]) -> ColumnElement[bool]:
    return or_(table.lease_owner.is_(None), table.lease_owner.not_in(living))
