"""Removes ended jobs with their history: on a user's request, and by age.

Checkpoints are kept unless the user asks otherwise. All of a job's rows go in one transaction. It
leaves one row (`RemovedJob`), which answers a repeated request, informs the live streams, and keeps
the totals over all jobs. A removal that a crash interrupted is completed by repeating it.
"""

from __future__ import annotations

import asyncio
import time

import structlog
from sqlalchemy import delete, func, select
from sqlalchemy.exc import SQLAlchemyError

from holdfast_service.errors import JobNotEnded, JobNotFound
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
from holdfast_service.store.job_lookup import canonical, find_job
from holdfast_service.store.models import Base, IncidentRow, JobRecord, RemovedJob
from holdfast_service.store.transaction import JobTransaction
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

    async def remove(
        self, job_id: str, *, with_checkpoints: bool, expected: Generations = None
    ) -> RemovedJobView:
        """Remove an ended job. Repeated, it returns the first answer.

        Raises JobNotFound, JobNotEnded, JobChanged; with its checkpoints also CheckpointPinned and
        CheckpointNeeded before anything is removed, CheckpointElsewhere, StorageUnavailable.
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
        async with self._store.read() as session:
            job = await find_job(session, job_id)
            refuse_if_changed(job, expected)
            _refuse_unless_over(job)
        removed = await self._checkpoints.remove_all(job_id) if with_checkpoints else ()
        async with command_transaction(self._store, job_id) as tx:
            refuse_if_changed(tx.job, expected)
            _refuse_unless_over(tx.job)
            left = await queries.checkpoints(tx.session, job_id)
            view = RemovedJobView(
                id=job_id,
                name=tx.job.name,
                removed_checkpoints=removed,
                kept_checkpoints=tuple(row.uri for row in left if row.deleted_at is None),
            )
            await _remove_rows(tx, view)
        return view

    async def expire_forever(self) -> None:
        """Remove the jobs that ended too long ago, now and then; other servers may do the same."""
        while self._keep_s is not None:
            removed = 0
            try:
                removed = await self.expire(time.time())
            except (SQLAlchemyError, OSError) as error:
                log.warning("ended jobs were not removed", error=str(error))
            await asyncio.sleep(0 if removed == EXPIRE_AT_ONCE else EXPIRE_EVERY_S)

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
        done = 0
        for job_id in found:
            try:
                removed = await self.remove(job_id, with_checkpoints=False)
            except Exception as error:  # of this job: the others must not wait for it
                log.warning("an ended job was not removed", job=job_id, exc_info=error)
                continue
            log.info("removed an ended job", job=removed.id, kept=len(removed.kept_checkpoints))
            done += 1
        return done


def _refuse_unless_over(job: JobRecord) -> None:
    """Raises JobNotEnded."""
    state = State(job.state)
    if not state.terminal:
        raise JobNotEnded(f"job {job.id} is {state}: cancel it before you remove it")
    if not job.cleaned:
        raise JobNotEnded(f"job {job.id} still leaves the cluster: repeat the call in a moment")


async def _remove_rows(tx: JobTransaction, answer: RemovedJobView) -> None:
    job = tx.job
    of_job = (IncidentRow.job_id == job.id, IncidentRow.closed_at.is_not(None))
    closed = await tx.session.scalars(select(IncidentRow).where(*of_job))
    kept = RemovedJob(
        id=job.id,
        removed_at=tx.now,
        answer=answer.model_dump(mode="json"),
        productive_s=job.productive_s or 0.0,
        held_s=job.held_s,
        incidents=[counted_of(incident) for incident in closed],
    )
    tx.session.add(kept)
    await tx.session.flush()  # while the job's own change number is there
    for table in _PARTS:
        await tx.session.execute(delete(table).where(table.c.job_id == job.id))
    await tx.session.delete(job)
