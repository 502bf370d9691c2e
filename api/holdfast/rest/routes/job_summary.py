"""`/jobs/{id}/glance`: the first data of a job's page, in one response."""

from __future__ import annotations

from fastapi import APIRouter

from holdfast.rest.http.problems import documented
from holdfast.rest.routes.jobs import JobId
from holdfast.rest.routes.ranks import RankHistoryDep
from holdfast.rest.services import ServicesDep
from holdfast_service.views.timeline import GlanceView

router = APIRouter(prefix="/api/v1/jobs", tags=["history"], responses=documented(404, 422))


@router.get("/{job_id}/glance", summary="The job, its verdict, timeline and ranks, in one response")
async def get_glance(services: ServicesDep, job_id: JobId, query: RankHistoryDep) -> GlanceView:
    """Each part equals the response of its own path; the parameters apply to the ranks."""
    return await services.overview.glance(job_id, query)
