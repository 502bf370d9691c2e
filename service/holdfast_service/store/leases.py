"""Who drives which job: leases with tokens, by the database's clock.

A lease is a promise for a time. Its holder renews it while it works; when it dies, the time runs
out and another takes the job with a new token. The token, not the time, guards every write: a
holder that was merely slow finds its token gone and lets go.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from uuid import uuid4

from sqlalchemy import ColumnElement, and_, case, false, select, update

from holdfast_service.store.engine import Store
from holdfast_service.store.models import Job

RENEWED_TOGETHER = 100
CLAIMED_TOGETHER = 200


@dataclass(frozen=True)
class Lease:
    job_id: str
    token: str


async def claim(store: Store, owner: str, limit: int, lease_s: float) -> list[Lease]:
    """Take up to `limit` jobs, and CLAIMED_TOGETHER at most, that have work left, are due, and that
    nobody holds."""
    if limit <= 0:
        return []
    async with store.read() as session:
        # Looking takes no lock; on SQLite there is but one right to write.
        if await session.scalar(select(Job.id).where(_free(store)).limit(1)) is None:
            return []
    token = str(uuid4())
    async with store.write() as session:
        free = (
            select(Job.id)
            .where(_free(store))
            .order_by(Job.due_at, Job.id)
            .limit(min(limit, CLAIMED_TOGETHER))
            .with_for_update(skip_locked=True)
        )
        taken = await session.scalars(
            update(Job)
            .where(Job.id.in_(free))
            .values(
                lease_owner=owner,
                lease_token=token,
                lease_until=store.clock() + lease_s,
                due_at=store.clock(),  # 0 from here on: somebody wants it looked at anew
                changed=Job.changed,  # nothing that anybody is shown
            )
            .returning(Job.id)
            .execution_options(synchronize_session=False)
        )
        return [Lease(job_id, token) for job_id in sorted(taken)]


async def renew(store: Store, owner: str, job_ids: Collection[str], lease_s: float) -> set[str]:
    """Prolong those leases that `owner` still holds; returns their jobs. Others may write between
    two parts of many."""
    ids = sorted(job_ids)
    kept: set[str] = set()
    for start in range(0, len(ids), RENEWED_TOGETHER):
        some = ids[start : start + RENEWED_TOGETHER]
        async with store.write() as session:
            kept |= set(
                await session.scalars(
                    update(Job)
                    .where(Job.lease_owner == owner, Job.id.in_(some))
                    .values(lease_until=store.clock() + lease_s, changed=Job.changed)
                    .returning(Job.id)
                    .execution_options(synchronize_session=False)
                )
            )
    return kept


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
                lease_until=0.0,
                changed=Job.changed,
                due_at=case((Job.due_at == 0.0, 0.0), else_=store.clock() + due_in_s),
            )
            .execution_options(synchronize_session=False)
        )


def _free(store: Store) -> ColumnElement[bool]:
    now = store.clock()
    return and_(Job.cleaned == false(), Job.due_at <= now, Job.lease_until <= now)
