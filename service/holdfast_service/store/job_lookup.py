"""From the id that somebody gave to a job's row, or JobNotFound."""

from __future__ import annotations

from uuid import UUID

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.job_errors import JobNotFound, SpecUnreadable
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.store.models import Job
from holdfast_service.store.statement import JOB, Statement

_JOB = Statement(select(Job.__table__).where(Job.id == JOB))


async def find_job(session: AsyncSession, job_id: str) -> Job:
    """Its row as it is now: it has a Job's attributes, and nothing is written through it."""
    job: Job | None = await _JOB.first(session, job=canonical(job_id))
    if job is None:
        raise not_found(job_id)
    return job


def spec_of(job: Job) -> JobSpec:
    """Raises SpecUnreadable."""
    try:
        return JobSpec.model_validate(job.spec)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "its root"
        raise SpecUnreadable(
            f"the spec of job {job.id} was stored by another version of Holdfast, and this one "
            f"cannot read it ({where}: {first['msg']}): ask a server of that version"
        ) from error


def canonical(job_id: str) -> str:
    """The id, if it could be one: what else a path may hold, a database need not understand."""
    try:
        if str(UUID(job_id)) == job_id:
            return job_id
    except ValueError:
        pass
    whole = "a job is called by its whole id here, and `GET /api/v1/jobs?q=` finds it by its name"
    raise JobNotFound(f"{not_found(job_id)}: {whole}")


def not_found(job_id: str) -> JobNotFound:
    return JobNotFound(f"there is no job {job_id[:64]!r}")
