"""`/jobs/{id}/ranks`: where the ranks of a job are, how fast they compute, and since when."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query

from holdfast.rest.history import Time
from holdfast.rest.jobs import JobId
from holdfast.rest.problems import documented
from holdfast.rest.services import OverviewDep
from holdfast_service.readers.ranks import RankHistoryQuery
from holdfast_service.views.ranks import (
    RankDetailView,
    RankHeatView,
    RankHistoryView,
    RankMeasure,
    RanksView,
)

router = APIRouter(
    prefix="/api/v1/jobs/{job_id}/ranks", tags=["ranks"], responses=documented(404, 422)
)


def asked(
    *,
    since: Time = None,
    until: Time = None,
    buckets: Annotated[int, Query(ge=1, le=500)] = 120,
    of: RankMeasure = RankMeasure.COMPUTE_S,
) -> RankHistoryQuery:
    return RankHistoryQuery(since, until, buckets, of)


AskedDep = Annotated[RankHistoryQuery, Depends(asked)]


@router.get("", response_model=RanksView, summary="The ranks of the newest attempt, as last seen")
async def ranks(overview: OverviewDep, job_id: JobId) -> RanksView:
    return await overview.ranks(job_id)


@router.get("/history", response_model=RankHistoryView, summary="Rank by time, as numbers")
async def history(overview: OverviewDep, job_id: JobId, asked: AskedDep) -> RankHistoryView:
    return await overview.rank_history(job_id, asked)


@router.get("/heat", response_model=RankHeatView, summary="Rank by time, packed for a heatmap")
async def heat(overview: OverviewDep, job_id: JobId, asked: AskedDep) -> RankHeatView:
    return await overview.heat(job_id, asked)


@router.get(
    "/{rank}", response_model=RankDetailView, summary="One rank: who had it, and its stacks"
)
async def rank(
    overview: OverviewDep, job_id: JobId, rank: Annotated[int, Path(ge=0, le=2**31 - 1)]
) -> RankDetailView:
    return await overview.rank(job_id, rank)
