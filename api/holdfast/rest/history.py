"""`/jobs/{id}/...`: what happened to a job: attempts, incidents, goodput, metrics, digests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query

from holdfast.rest.jobs import JobId
from holdfast.rest.problems import documented
from holdfast.rest.services import JobsDep
from holdfast_service.goodput_view import GoodputView
from holdfast_service.views import (
    AttemptView,
    DigestPage,
    IncidentView,
    MetricPage,
)

router = APIRouter(prefix="/api/v1/jobs/{job_id}", tags=["history"], responses=documented(404, 422))

AfterStep = Annotated[int, Query(ge=0, le=2**53, description="only steps above this one")]


@router.get("/attempts", response_model=list[AttemptView], summary="Every world that was formed")
async def attempts(jobs: JobsDep, job_id: JobId) -> Sequence[AttemptView]:
    return await jobs.attempts(job_id)


@router.get("/incidents", response_model=list[IncidentView], summary="Every fault and recovery")
async def incidents(jobs: JobsDep, job_id: JobId) -> Sequence[IncidentView]:
    return await jobs.incidents(job_id)


@router.get("/goodput", response_model=GoodputView, summary="Where the time went")
async def goodput(jobs: JobsDep, job_id: JobId) -> GoodputView:
    return await jobs.goodput(job_id)


@router.get("/metrics", response_model=MetricPage, summary="The committed history, per step")
async def metrics(
    jobs: JobsDep,
    job_id: JobId,
    *,
    name: Annotated[list[str] | None, Query(description="one or more; none: all")] = None,
    after_step: AfterStep = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    max_points: Annotated[
        int | None, Query(ge=2, le=10_000, description="thin the whole series out instead")
    ] = None,
) -> MetricPage:
    return await jobs.metrics(
        job_id, names=name, after_step=after_step, limit=limit, max_points=max_points
    )


@router.get("/digests", response_model=DigestPage, summary="Digest of the whole state, per step")
async def digests(
    jobs: JobsDep,
    job_id: JobId,
    after_step: AfterStep = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
) -> DigestPage:
    return await jobs.digests(job_id, after_step=after_step, limit=limit)
