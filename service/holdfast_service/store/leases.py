"""Job leases: they assign each job to one reconciler, with tokens and by the database's clock.

A reconciler keeps one expiry time for all the jobs that it holds and renews it periodically. When
the reconciler dies, the time runs out and other reconcilers take its jobs with new tokens. The
token, not the time, guards every write: a slow holder finds its token replaced and stops.

A job is free if its owner is not among the living: expired, or forgotten. Only a renewal brings
an owner to life. An owner locks its own row while it claims or renews, and a claim takes jobs only
from owners whose rows it has locked or which have none: a transaction that commits late is never
overtaken.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from uuid import uuid4

from sqlalchemy import (
    ColumnElement,
    Select,
    and_,
    case,
    delete,
    exists,
    false,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.store.engine import Store
from holdfast_service.store.models import JobRecord, LeaseOwner

MAX_CLAIMED = 200
LOOKUP_BATCH = 500


@dataclass(frozen=True)
class JobLease:
    job_id: str
    token: str


async def claim(store: Store, owner: str, limit: int) -> list[JobLease]:
    """Claim up to `limit` jobs (at most `MAX_CLAIMED`) that have work left, are due, and have no
    live holder. Claims nothing if the owner itself is not alive: it must renew first, and learns
    which jobs it has lost."""
    if limit <= 0:
        return []
    living = select(LeaseOwner.id).where(LeaseOwner.until > store.clock())
    async with store.read() as session:
        # This check takes no lock; SQLite has a single write lock.
        candidates = select(JobRecord.id).where(_is_due(store), _is_free(living)).limit(1)
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
            select(JobRecord.id)
            .where(_is_due(store), _is_free(living))
            .order_by(JobRecord.due_at, JobRecord.id)
            .limit(min(limit, MAX_CLAIMED))
            .with_for_update(skip_locked=True)
        )
        locked = list(await session.scalars(due))
        taken = await session.scalars(
            update(JobRecord)
            # Checked again, now that the row cannot change: a claim, and the row of its owner, may
            # have been committed since the previous statement began.
            .where(JobRecord.id.in_(locked), _is_free(living))
            .values(
                lease_owner=owner,
                lease_token=token,
                due_at=store.clock(),  # a later 0 means that a user command needs handling
                changed=JobRecord.changed,  # unchanged: leases are not visible to users
            )
            .returning(JobRecord.id)
            .execution_options(synchronize_session=False)
        )
        leases = [JobLease(job_id, token) for job_id in sorted(taken)]
        await _delete_idle_owners(session, dead)
        return leases


async def renew(store: Store, owner: str, job_ids: Collection[str], lease_s: float) -> set[str]:
    """Renew the leases of `owner`; returns the jobs that it still holds."""
    async with store.write() as session:
        in_time = await session.scalar(_is_alive(store, owner))
        insert = (postgresql.insert if store.postgres else sqlite.insert)(LeaseOwner)
        upsert = insert.values(id=owner, until=store.clock() + lease_s)
        await session.execute(
            upsert.on_conflict_do_update(
                index_elements=[LeaseOwner.id], set_={"until": upsert.excluded.until}
            )
        )
        return set(job_ids) if in_time else await _still_held(session, owner, job_ids)


async def release(store: Store, lease: JobLease, due_in_s: float) -> None:
    """Release the job; it is due again after `due_in_s`, or at once if a user command arrived since
    it was claimed. Does nothing if the lease is lost."""
    async with store.write() as session:
        await session.execute(
            update(JobRecord)
            .where(JobRecord.id == lease.job_id, JobRecord.lease_token == lease.token)
            .values(
                lease_owner=None,
                lease_token=None,
                changed=JobRecord.changed,
                due_at=case((JobRecord.due_at == 0.0, 0.0), else_=store.clock() + due_in_s),
            )
            .execution_options(synchronize_session=False)
        )


async def commanded(store: Store, owner: str) -> dict[str, tuple[int, int]]:
    """The jobs of `owner` that got a user's command since their claim, with the numbers of the
    newest: of changes, and of injected faults."""
    columns = (JobRecord.id, JobRecord.generation, JobRecord.faults_wanted)
    mine = (JobRecord.cleaned == false(), JobRecord.lease_owner == owner, JobRecord.due_at == 0.0)
    async with store.read() as session:
        rows = await session.execute(select(*columns).where(*mine))
        return {job_id: (changes, faults) for job_id, changes, faults in rows}


async def undriven(store: Store, owner: str, driven: Collection[str]) -> set[JobLease]:
    """The leases that `owner` holds without driving the job: the answer to its claim was lost, or a
    release failed."""
    mine = and_(JobRecord.cleaned == false(), JobRecord.lease_owner == owner)
    async with store.read(long=True) as session:
        held = await session.scalar(select(func.count()).select_from(JobRecord).where(mine))
        if not held or held <= len(driven):
            return set()
        rows = await session.execute(select(JobRecord.id, JobRecord.lease_token).where(mine))
        return {JobLease(job_id, token or "") for job_id, token in rows if job_id not in driven}


async def leave(store: Store, owner: str) -> None:
    """Expire `owner`, so that others may claim its jobs at once."""
    async with store.write() as session:
        await session.execute(
            update(LeaseOwner)
            .where(LeaseOwner.id == owner)
            .values(until=store.clock())
            .execution_options(synchronize_session=False)
        )
        await _delete_idle_owners(session, [owner])


async def _still_held(session: AsyncSession, owner: str, job_ids: Collection[str]) -> set[str]:
    """The jobs of an expired owner that no other reconciler has taken, or is about to take."""
    ids = sorted(job_ids)
    kept: set[str] = set()
    for start in range(0, len(ids), LOOKUP_BATCH):
        batch = ids[start : start + LOOKUP_BATCH]
        held = select(JobRecord.id).where(JobRecord.lease_owner == owner, JobRecord.id.in_(batch))
        kept |= set(await session.scalars(held.order_by(JobRecord.id).with_for_update()))
    return kept


async def _delete_idle_owners(session: AsyncSession, owners: list[str]) -> None:
    """Delete the given owners, except those that still hold unfinished jobs."""
    if owners:
        await session.execute(
            delete(LeaseOwner).where(
                LeaseOwner.id.in_(owners),
                ~exists().where(
                    JobRecord.cleaned == false(), JobRecord.lease_owner == LeaseOwner.id
                ),
            )
        )


def _is_alive(store: Store, owner: str) -> Select[bool]:
    """Locks the owner's row; no row: the owner is new, or was forgotten."""
    alive = select(LeaseOwner.until > store.clock()).where(LeaseOwner.id == owner)
    return alive.with_for_update()


def _is_due(store: Store) -> ColumnElement[bool]:
    return and_(JobRecord.cleaned == false(), JobRecord.due_at <= store.clock())


def _is_free(living: Select[str]) -> ColumnElement[bool]:
    return or_(JobRecord.lease_owner.is_(None), JobRecord.lease_owner.not_in(living))
