"""`/jobs/{id}/...`: the history of a job: attempts, incidents, goodput, metrics, digests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query

from holdfast.rest.jobs import JobId
from holdfast.rest.problems import documented
from holdfast.rest.services import JobsDep, OverviewDep
from holdfast_service.views.goodput import GoodputView
from holdfast_service.views.jobs import AttemptView, DigestPage, IncidentView, MetricPage
from holdfast_service.views.timeline import TimelineView, VerdictView

router = APIRouter(prefix="/api/v1/jobs/{job_id}", tags=["history"], responses=documented(404, 422))

Time = Annotated[
    float | None, Query(ge=0, le=1e11, allow_inf_nan=False, description="Unix seconds")
]
AfterStep = Annotated[int, Query(ge=0, le=2**53, description="only steps above this one")]


@router.get("/attempts", summary="All attempts of the job")
async def attempts(jobs: JobsDep, job_id: JobId) -> Sequence[AttemptView]:
    return await jobs.attempts(job_id)


@router.get("/incidents", summary="All faults and recoveries")
async def incidents(jobs: JobsDep, job_id: JobId) -> Sequence[IncidentView]:
    return await jobs.incidents(job_id)


@router.get("/goodput", summary="Goodput: the time of the job, by use", responses=documented(409))
async def goodput(jobs: JobsDep, job_id: JobId) -> GoodputView:
    return await jobs.goodput(job_id)


@router.get("/verdict", summary="The state of the job in sentences")
async def verdict(overview: OverviewDep, job_id: JobId) -> VerdictView:
    return await overview.verdict(job_id)


@router.get("/timeline", summary="The run of the job as spans of time, by kind")
async def timeline(
    overview: OverviewDep, job_id: JobId, since: Time = None, until: Time = None
) -> TimelineView:
    return await overview.timeline(job_id, since, until)


@router.get("/metrics", summary="The committed history, per step")
async def metrics(
    jobs: JobsDep,
    job_id: JobId,
    *,
    name: Annotated[list[str] | None, Query(description="one or more names; default: all")] = None,
    names: Annotated[
        str | None, Query(max_length=500, description="names, separated by commas")
    ] = None,
    after_step: AfterStep = 0,
    until_step: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    max_points: Annotated[
        int | None, Query(ge=2, le=10_000, description="thin out the whole series instead")
    ] = None,
    points: Annotated[
        int | None,
        Query(
            ge=16,
            le=10_000,
            description="thin out the whole series to this many points; keeps the smallest and the "
            "largest value of each bucket",
        ),
    ] = None,
    discarded: Annotated[
        bool, Query(description="include the steps discarded by rollbacks")
    ] = False,
) -> MetricPage:
    selected = [*(name or ()), *(item for item in (names or "").split(",") if item)]
    return await jobs.metrics(
        job_id,
        names=selected or None,
        after_step=after_step,
        until_step=until_step,
        limit=limit,
        max_points=max_points,
        points=points,
        discarded=discarded,
    )


@router.get("/digests", summary="Digest of the whole state, per step")
async def digests(
    jobs: JobsDep,
    job_id: JobId,
    after_step: AfterStep = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
) -> DigestPage:
    return await jobs.digests(job_id, after_step=after_step, limit=limit)
