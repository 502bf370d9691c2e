"""`/jobs/{id}/glance`: what a page about a job shows first, in one answer."""

from __future__ import annotations

from fastapi import APIRouter

from holdfast.rest.jobs import JobId
from holdfast.rest.problems import documented
from holdfast.rest.ranks import AskedDep
from holdfast.rest.services import OverviewDep
from holdfast_service.views.timeline import GlanceView

router = APIRouter(prefix="/api/v1/jobs", tags=["history"], responses=documented(404, 422))


@router.get(
    "/{job_id}/glance",
    response_model=GlanceView,
    summary="The job, its verdict, its life and its ranks, in one answer",
)
async def glance(overview: OverviewDep, job_id: JobId, asked: AskedDep) -> GlanceView:
    """Each part as its own address tells it; the parameters are of the ranks."""
    return await overview.glance(job_id, asked)
