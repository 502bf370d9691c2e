"""Removes ended jobs with their history: on a user's request, and by age.

Checkpoints are kept unless the user asks otherwise. All of a job's rows go in one transaction. It
leaves one row (`RemovedJob`), which answers a repeated request, informs the live streams, and keeps
the totals over all jobs.

If checkpoints go too, the transaction that decides it, by the job as it is then, records the intent
`remove.checkpoints`; they are deleted after it, and nothing refuses the removal any more but a
checkpoint that is pinned or needed. A removal that was interrupted is completed by repeating it, or
by a server.
"""

from __future__ import annotations

import asyncio
import time

import structlog
from sqlalchemy import delete, func, select
from sqlalchemy.exc import SQLAlchemyError

from holdfast_service.errors import ApiError, JobNotEnded, JobNotFound, StorageUnavailable
from holdfast_service.job_model.lifecycle import TERMINAL, State
from holdfast_service.readers.fleet_metrics import counted_of
from holdfast_service.services.checkpoints import CheckpointService
from holdfast_service.services.job_commands import (
    Generations,
    command_transaction,
    refuse_if_changed,
)
from holdfast_service.settings import Settings
from holdfast_service.store import queries
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import canonical
from holdfast_service.store.models import Base, IncidentRow, Intent, JobRecord, RemovedJob
from holdfast_service.store.transaction import Effect, JobTransaction
from holdfast_service.views.jobs import RemovedJobView

EXPIRE_EVERY_S = 600.0
EXPIRE_AT_ONCE = 100
_PARTS = tuple(
    table for table in reversed(Base.metadata.sorted_tables) if "job_id" in table.columns
)
"""The tables with rows of a job, beside its own row."""

log = structlog.get_logger(__name__)


class JobRemoval:
    def __init__(self, store: Store, checkpoints: CheckpointService, settings: Settings) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._keep_s = settings.keep_ended_jobs_s
        self._deadline_s = settings.storage_deadline_s

    async def remove(
        self, job_id: str, *, with_checkpoints: bool, expected: Generations = None
    ) -> RemovedJobView:
        """Remove an ended job. Repeated, it returns the first answer.

        Raises JobNotFound, JobNotEnded, and JobChanged before anything is removed; with its
        checkpoints also CheckpointPinned, CheckpointNeeded, CheckpointElsewhere; and
        StorageUnavailable, after which a server completes the removal.
        """
        try:
            return await self._remove(job_id, with_checkpoints, expected)
        except JobNotFound:
            async with self._store.read() as session:
                earlier = await session.get(RemovedJob, canonical(job_id))
            if earlier is None:
                raise
            return RemovedJobView.model_validate(earlier.answer)

    async def _remove(
        self, job_id: str, with_checkpoints: bool, expected: Generations
    ) -> RemovedJobView:
        async with command_transaction(self._store, job_id) as tx:
            key = tx.job.id, Effect.REMOVE_CHECKPOINTS
            begun = await tx.session.get(Intent, key) is not None
            if not begun:
                refuse_if_changed(tx.job, expected)
            _refuse_unless_over(tx.job)
            if not (begun or with_checkpoints):
                return await _remove_rows(tx, ())
            intent = await tx.record_intent(Effect.REMOVE_CHECKPOINTS)
            intent.at = tx.now  # also if repeated: until its deadline, no server does the same
        try:
            removed = await self._checkpoints.remove_all(job_id)
        except StorageUnavailable:
            raise
        except ApiError:  # something refuses it
            async with command_transaction(self._store, job_id) as tx:
                await tx.forget_intents(Effect.REMOVE_CHECKPOINTS)
            raise
        async with command_transaction(self._store, job_id) as tx:
            return await _remove_rows(tx, removed)

    async def expire_forever(self) -> None:
        """Complete interrupted removals, and remove the jobs that ended too long ago, now and then;
        other servers may do the same."""
        while True:
            removed = 0
            try:
                await self.complete_begun(time.time())
                removed = await self.expire(time.time())
            except (SQLAlchemyError, OSError) as error:
                log.warning("ended jobs were not removed", error=str(error))
            await asyncio.sleep(0 if removed == EXPIRE_AT_ONCE else EXPIRE_EVERY_S)

    async def complete_begun(self, now: float) -> list[str]:
        """Complete the removals that no request waits for any more; returns the removed jobs."""
        begun = (
            select(Intent.job_id)
            .where(Intent.name == Effect.REMOVE_CHECKPOINTS, Intent.at < now - self._deadline_s)
            .order_by(func.random())  # removals whose storage is gone must not keep others
            .limit(EXPIRE_AT_ONCE)
        )
        async with self._store.read() as session:
            found = list(await session.scalars(begun))
        return [job_id for job_id in found if await self._remove_quietly(job_id)]

    async def expire(self, now: float) -> int:
        """Remove jobs that ended too long ago, at most `EXPIRE_AT_ONCE`; returns their number."""
        if self._keep_s is None:
            return 0
        over = (
            select(JobRecord.id)
            .where(
                JobRecord.state.in_(sorted(TERMINAL)),
                JobRecord.cleaned,
                JobRecord.ended_at < now - self._keep_s,
            )
            .order_by(func.random())  # jobs that cannot be removed must not keep others
            .limit(EXPIRE_AT_ONCE)
        )
        async with self._store.read() as session:
            found = list(await session.scalars(over))
        return sum([await self._remove_quietly(job_id) for job_id in found])

    async def _remove_quietly(self, job_id: str) -> bool:
        try:
            removed = await self.remove(job_id, with_checkpoints=False)
        except Exception as error:  # of this job: the others must not wait for it
            log.warning("an ended job was not removed", job=job_id, exc_info=error)
            return False
        log.info("removed an ended job", job=removed.id, kept=len(removed.kept_checkpoints))
        return True


def _refuse_unless_over(job: JobRecord) -> None:
    """Raises JobNotEnded."""
    state = State(job.state)
    if not state.terminal:
        raise JobNotEnded(f"job {job.id} is {state}: cancel it before you remove it")
    if not job.cleaned:
        raise JobNotEnded(f"job {job.id} still leaves the cluster: repeat the call in a moment")


async def _remove_rows(tx: JobTransaction, removed_checkpoints: tuple[str, ...]) -> RemovedJobView:
    job = tx.job
    left = await queries.checkpoints(tx.session, job.id)
    answer = RemovedJobView(
        id=job.id,
        name=job.name,
        removed_checkpoints=removed_checkpoints,
        kept_checkpoints=tuple(row.uri for row in left if row.deleted_at is None),
    )
    of_job = (IncidentRow.job_id == job.id, IncidentRow.closed_at.is_not(None))
    closed = await tx.session.scalars(select(IncidentRow).where(*of_job))
    kept = RemovedJob(
        id=job.id,
        removed_at=tx.now,
        answer=answer.model_dump(mode="json"),
        productive_s=job.productive_s,
        held_s=job.held_s,
        incidents=[counted_of(incident) for incident in closed],
    )
    tx.session.add(kept)
    await tx.session.flush()  # while the job's own change number is there
    for table in _PARTS:
        await tx.session.execute(delete(table).where(table.c.job_id == job.id))
    await tx.session.delete(job)
    return answer
