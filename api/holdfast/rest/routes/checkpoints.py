"""`/jobs/{id}/checkpoints`: list, pin, remove; operations.py verifies and exports them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from holdfast.rest.http.problems import documented
from holdfast.rest.routes.jobs import JobId
from holdfast.rest.services import ServicesDep
from holdfast_service.views.checkpoints import CheckpointView
from holdfast_service.views.pages import CheckpointPage

router = APIRouter(prefix="/api/v1/jobs/{job_id}/checkpoints", tags=["checkpoints"])

Step = Annotated[int, Path(ge=0, le=2**53, description="step of the checkpoint")]


@router.get("", summary="The checkpoints of a job, by tier", responses=documented(404, 422))
async def list_checkpoints(services: ServicesDep, job_id: JobId) -> CheckpointPage:
    return await services.checkpoints.list(job_id)


@router.put(
    "/{step}/pin",
    summary="Pin a checkpoint against removal; idempotent",
    responses=documented(404, 409, 422, 503),
)
async def pin_checkpoint(services: ServicesDep, job_id: JobId, step: Step) -> CheckpointView:
    return await services.checkpoints.pin(job_id, step)


@router.delete(
    "/{step}/pin",
    summary="Unpin a checkpoint; idempotent",
    responses=documented(404, 422, 503),
)
async def unpin_checkpoint(services: ServicesDep, job_id: JobId, step: Step) -> CheckpointView:
    return await services.checkpoints.unpin(job_id, step)


@router.delete(
    "/{step}",
    status_code=204,
    summary="Remove a checkpoint, unless it is pinned, needed, or the job's last",
    responses=documented(404, 409, 422, 503),
)
async def remove_checkpoint(services: ServicesDep, job_id: JobId, step: Step) -> None:
    await services.checkpoints.remove(job_id, step)
