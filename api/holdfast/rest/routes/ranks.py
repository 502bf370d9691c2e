"""`/jobs/{id}/ranks`: the places and speeds of a job's ranks, now and over time."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from holdfast.rest.http.problems import documented
from holdfast.rest.routes.history import RankHistoryDep
from holdfast.rest.routes.jobs import JobId
from holdfast.rest.services import ServicesDep
from holdfast_service.views.ranks import (
    RankDetailView,
    RankHeatView,
    RankHistoryView,
    RanksView,
)

router = APIRouter(
    prefix="/api/v1/jobs/{job_id}/ranks", tags=["ranks"], responses=documented(404, 422)
)


@router.get("", summary="The ranks of the newest attempt, as last reported")
async def get_ranks(services: ServicesDep, job_id: JobId) -> RanksView:
    return await services.overview.ranks(job_id)


@router.get("/history", summary="A quantity of each rank over time, as numbers")
async def get_rank_history(
    services: ServicesDep, job_id: JobId, query: RankHistoryDep
) -> RankHistoryView:
    return await services.overview.rank_history(job_id, query)


@router.get("/heat", summary="A quantity of each rank over time, packed for a heatmap")
async def get_rank_heat(
    services: ServicesDep, job_id: JobId, query: RankHistoryDep
) -> RankHeatView:
    return await services.overview.heat(job_id, query)


@router.get("/{rank}", summary="A rank: its workers and its stacks")
async def get_rank(
    services: ServicesDep, job_id: JobId, rank: Annotated[int, Path(ge=0, le=2**31 - 1)]
) -> RankDetailView:
    return await services.overview.rank(job_id, rank)
