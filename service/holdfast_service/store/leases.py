"""Who drives which job: leases with tokens, by the database's clock.

A reconciler promises to be there for a time, and renews that one promise however many jobs it
holds; when it dies, the time runs out and others take its jobs with new tokens. The token, not the
time, guards every write: a holder that was merely slow finds its token gone and lets go.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
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
from holdfast_service.store.models import Job, LeaseOwner

CLAIMED_TOGETHER = 200
LOOKED_AT_TOGETHER = 500


@dataclass(frozen=True)
class Lease:
    job_id: str
    token: str


async def claim(store: Store, owner: str, limit: int, lease_s: float) -> list[Lease]:
    """Take up to `limit` jobs, and CLAIMED_TOGETHER at most, that have work left, are due, and that
    nobody alive holds. None, if the owner's own time has run out: it has to renew first."""
    if limit <= 0:
        return []
    gone = select(LeaseOwner.id).where(LeaseOwner.until <= store.clock())
    async with store.read() as session:
        # Looking takes no lock; on SQLite there is but one right to write.
        if await session.scalar(select(Job.id).where(_free(store, gone)).limit(1)) is None:
            return []
    token = str(uuid4())
    async with store.write() as session:
        # Locked: one that renews meanwhile hears afterwards of what was taken.
        dead = list(await session.scalars(gone.order_by(LeaseOwner.id).with_for_update()))
        if owner in dead:
            return []
        await session.execute(_promise(store, owner, lease_s).on_conflict_do_nothing())
        due = (
            select(Job.id)
            .where(_free(store, dead))
            .order_by(Job.due_at, Job.id)
            .limit(min(limit, CLAIMED_TOGETHER))
            .with_for_update(skip_locked=True)
        )
        taken = await session.scalars(
            update(Job)
            .where(Job.id.in_(due))
            .values(
                lease_owner=owner,
                lease_token=token,
                due_at=store.clock(),  # 0 from here on: somebody wants it looked at anew
                changed=Job.changed,  # nothing that anybody is shown
            )
            .returning(Job.id)
            .execution_options(synchronize_session=False)
        )
        leases = [Lease(job_id, token) for job_id in sorted(taken)]
        await _forget(session, dead)
        return leases


async def renew(store: Store, owner: str, job_ids: Collection[str], lease_s: float) -> set[str]:
    """Prolong the leases of `owner`; returns those jobs that it still holds."""
    async with store.write() as session:
        mine = select(LeaseOwner.until > store.clock()).where(LeaseOwner.id == owner)
        in_time = await session.scalar(mine.with_for_update())
        promise = _promise(store, owner, lease_s)
        await session.execute(
            promise.on_conflict_do_update(
                index_elements=[LeaseOwner.id], set_={"until": promise.excluded.until}
            )
        )
        return set(job_ids) if in_time else await _still_held(session, owner, job_ids)


async def release(store: Store, lease: Lease, due_in_s: float) -> None:
    """Give the job back, to be looked at again after `due_in_s`, or at once if a user has asked for
    something since it was claimed. No harm if the lease is lost."""
    async with store.write() as session:
        await session.execute(
            update(Job)
            .where(Job.id == lease.job_id, Job.lease_token == lease.token)
            .values(
                lease_owner=None,
                lease_token=None,
                changed=Job.changed,
                due_at=case((Job.due_at == 0.0, 0.0), else_=store.clock() + due_in_s),
            )
            .execution_options(synchronize_session=False)
        )


async def undriven(store: Store, owner: str, driven: Collection[str]) -> set[Lease]:
    """What `owner` holds beside the jobs that it drives: it has not heard that it was given them,
    or could not give them back."""
    mine = and_(Job.cleaned == false(), Job.lease_owner == owner)
    async with store.read(long=True) as session:
        held = await session.scalar(select(func.count()).select_from(Job).where(mine))
        if not held or held <= len(driven):
            return set()
        rows = await session.execute(select(Job.id, Job.lease_token).where(mine))
        return {Lease(job_id, token or "") for job_id, token in rows if job_id not in driven}


async def leave(store: Store, owner: str) -> None:
    """What `owner` still holds, others may take at once."""
    async with store.write() as session:
        await session.execute(
            update(LeaseOwner)
            .where(LeaseOwner.id == owner)
            .values(until=store.clock())
            .execution_options(synchronize_session=False)
        )
        await _forget(session, [owner])


async def _still_held(session: AsyncSession, owner: str, job_ids: Collection[str]) -> set[str]:
    """Its time had run out, and others may have taken some of its jobs."""
    ids = sorted(job_ids)
    kept: set[str] = set()
    for start in range(0, len(ids), LOOKED_AT_TOGETHER):
        some = ids[start : start + LOOKED_AT_TOGETHER]
        held = select(Job.id).where(Job.lease_owner == owner, Job.id.in_(some))
        kept |= set(await session.scalars(held))
    return kept


async def _forget(session: AsyncSession, owners: list[str]) -> None:
    """Those of whom nothing is left."""
    if owners:
        await session.execute(
            delete(LeaseOwner).where(
                LeaseOwner.id.in_(owners),
                ~exists().where(Job.cleaned == false(), Job.lease_owner == LeaseOwner.id),
            )
        )


def _promise(store: Store, owner: str, lease_s: float) -> Any:
    insert = postgresql.insert if store.postgres else sqlite.insert
    return insert(LeaseOwner).values(id=owner, until=store.clock() + lease_s)


def _free(store: Store, dead: Select[str] | list[str]) -> ColumnElement[bool]:
    held_by_nobody = or_(Job.lease_owner.is_(None), Job.lease_owner.in_(dead))
    return and_(Job.cleaned == false(), Job.due_at <= store.clock(), held_by_nobody)
