"""From the id that somebody gave to a job's row, or JobNotFound."""

from __future__ import annotations

from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_errors import JobNotFound
from holdfast_service.store.models import Job


async def find_job(session: AsyncSession, job_id: str) -> Job:
    job = await session.get(Job, canonical(job_id))
    if job is None:
        raise not_found(job_id)
    return job


def canonical(job_id: str) -> str:
    """The id, if it could be one: what else a path may hold, a database need not understand."""
    try:
        if str(UUID(job_id)) == job_id:
            return job_id
    except ValueError:
        pass
    raise not_found(job_id)


def not_found(job_id: str) -> JobNotFound:
    return JobNotFound(f"there is no job {job_id[:64]!r}")
