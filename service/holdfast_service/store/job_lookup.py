"""Looks a job up by the id that a user gave; raises JobNotFound if there is none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.errors import JobNotFound, SpecUnreadable
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.store.engine import Store
from holdfast_service.store.models import JobRecord
from holdfast_service.store.statement import JOB, Statement

_JOB = Statement(select(JobRecord.__table__).where(JobRecord.id == JOB))


async def find_job(session: AsyncSession, job_id: str) -> JobRecord:
    """The current row of the job. It has the attributes of a JobRecord and is read-only.

    Raises JobNotFound.
    """
    job: JobRecord | None = await _JOB.first(session, job=canonical(job_id))
    if job is None:
        raise not_found(job_id)
    return job


@asynccontextmanager
async def read_job(store: Store, job_id: str) -> AsyncIterator[tuple[AsyncSession, JobRecord]]:
    """A session for reading, and the job's row in it. Raises JobNotFound."""
    async with store.read() as session:
        yield session, await find_job(session, job_id)


def spec_of(job: JobRecord) -> JobSpec:
    """The stored spec of the job. Raises SpecUnreadable."""
    try:
        return JobSpec.model_validate(job.spec)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the top level"
        raise SpecUnreadable(
            f"the spec of job {job.id} was stored by another version of Holdfast and cannot be "
            f"read by this one ({where}: {first['msg']}): use a server of that version"
        ) from error


def canonical(job_id: str) -> str:
    """`job_id` if it is a well-formed UUID; raises JobNotFound otherwise, so that arbitrary path
    text never reaches the database."""
    try:
        if str(UUID(job_id)) == job_id:
            return job_id
    except ValueError:
        pass
    hint = "give the complete id; `GET /api/v1/jobs?q=` finds a job by its name"
    raise JobNotFound(f"{not_found(job_id)}: {hint}")


def not_found(job_id: str) -> JobNotFound:
    return JobNotFound(f"there is no job {job_id[:64]!r}")
