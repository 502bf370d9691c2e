"""`/jobs/{id}/...`: the history of a job: attempts, incidents, goodput, metrics, digests; and the
first data of its page, in one response."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from holdfast.rest.http.paging import AfterNumber, AfterRow, AfterStep, PageSize
from holdfast.rest.http.problems import documented
from holdfast.rest.routes.jobs import JobId
from holdfast.rest.services import ServicesDep
from holdfast_service.job_model.times import Time
from holdfast_service.readers.ranks import RankHistoryQuery
from holdfast_service.services.replays import MAX_STEPS
from holdfast_service.views.comparison import ComparisonView
from holdfast_service.views.goodput import GoodputView
from holdfast_service.views.pages import AttemptPage, DigestPage, IncidentPage, MetricPage
from holdfast_service.views.ranks import RankMeasure
from holdfast_service.views.timeline import GlanceView, TimelineView, VerdictView

router = APIRouter(prefix="/api/v1/jobs/{job_id}", tags=["history"], responses=documented(404, 422))

MaybeTime = Annotated[Time | None, Query(description="a time, as RFC 3339 describes it")]


def rank_history_query(
    *,
    since: MaybeTime = None,
    until: MaybeTime = None,
    buckets: Annotated[int, Query(ge=1, le=500)] = 120,
    of: RankMeasure = RankMeasure.COMPUTE_S,
) -> RankHistoryQuery:
    return RankHistoryQuery(since, until, buckets, of)


RankHistoryDep = Annotated[RankHistoryQuery, Depends(rank_history_query)]


@router.get("/attempts", summary="The attempts of the job", responses=documented(400))
async def list_attempts(
    services: ServicesDep, job_id: JobId, *, after: AfterNumber, limit: PageSize = 200
) -> AttemptPage:
    return await services.jobs.history.attempts(job_id, after, limit)


@router.get("/incidents", summary="Faults and recoveries", responses=documented(400))
async def list_incidents(
    services: ServicesDep, job_id: JobId, *, after: AfterNumber, limit: PageSize = 200
) -> IncidentPage:
    return await services.jobs.history.incidents(job_id, after, limit)


@router.get("/goodput", summary="Goodput: the time of the job, by use", responses=documented(409))
async def get_goodput(services: ServicesDep, job_id: JobId) -> GoodputView:
    return await services.jobs.history.goodput(job_id)


@router.get("/verdict", summary="The state of the job in sentences")
async def get_verdict(services: ServicesDep, job_id: JobId) -> VerdictView:
    return await services.overview.verdict(job_id)


@router.get("/timeline", summary="The run of the job as spans of time, by kind")
async def get_timeline(
    services: ServicesDep, job_id: JobId, since: MaybeTime = None, until: MaybeTime = None
) -> TimelineView:
    return await services.overview.timeline(job_id, since, until)


@router.get("/metrics", summary="The committed history, per step", responses=documented(400))
async def list_metrics(
    services: ServicesDep,
    job_id: JobId,
    *,
    name: Annotated[list[str] | None, Query(description="one or more names; default: all")] = None,
    after_step: AfterRow,
    until_step: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
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
    return await services.jobs.history.metrics(
        job_id,
        names=name or None,
        after_step=after_step,
        until_step=until_step,
        limit=limit,
        points=points,
        discarded=discarded,
    )


@router.get("/digests", summary="Digest of the whole state, per step", responses=documented(400))
async def list_digests(
    services: ServicesDep,
    job_id: JobId,
    *,
    after_step: AfterStep,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
) -> DigestPage:
    return await services.jobs.history.digests(job_id, after_step=after_step, limit=limit)


@router.get(
    "/comparison",
    summary="The digests of a replay and of the job that it replays",
    responses=documented(400, 409),
)
async def get_comparison(
    services: ServicesDep,
    job_id: JobId,
    *,
    after_step: AfterStep,
    limit: Annotated[int, Query(ge=1, le=MAX_STEPS)] = MAX_STEPS,
) -> ComparisonView:
    return await services.replays.compare(job_id, after_step=after_step, limit=limit)


@router.get("/glance", summary="The job, its verdict, timeline and ranks, in one response")
async def get_glance(services: ServicesDep, job_id: JobId, query: RankHistoryDep) -> GlanceView:
    """Each part equals the response of its own path; the parameters apply to the ranks."""
    return await services.overview.glance(job_id, query)
