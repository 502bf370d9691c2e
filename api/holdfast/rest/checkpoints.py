"""`/jobs/{id}/checkpoints`: list, verify, pin, remove, export."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import IO, Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Response
from starlette.responses import StreamingResponse

from holdfast.rest.jobs import JobId
from holdfast.rest.problems import documented
from holdfast.rest.services import CheckpointsDep
from holdfast_service.services.checkpoints import CheckpointService, FoundCheckpoint
from holdfast_service.views.jobs import CheckpointView, VerificationView
from holdfast_service.views.pages import CheckpointPage

router = APIRouter(prefix="/api/v1/jobs/{job_id}/checkpoints", tags=["checkpoints"])

Step = Annotated[int, Path(ge=0, le=2**53, description="step of the checkpoint")]

JSON_LINES = "application/x-ndjson"
SAFETENSORS = "application/octet-stream"
_CHUNK_BYTES = 1 << 20

_VERIFIED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Progress, a JSON line each; the last line has `done`, or a `problem`.",
        "content": {JSON_LINES: {"schema": {"$ref": "#/components/schemas/VerificationView"}}},
    },
    **documented(404, 422),
}
_EXPORTED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The file, with its length. All bytes are verified before the transfer.",
        "content": {SAFETENSORS: {"schema": {"type": "string", "format": "binary"}}},
    },
    **documented(404, 409, 422, 503),
}


@router.get("", summary="The checkpoints of a job, by tier", responses=documented(404, 422))
async def list_checkpoints(checkpoints: CheckpointsDep, job_id: JobId) -> CheckpointPage:
    return await checkpoints.list(job_id)


@router.post(
    "/{step}/verify",
    summary="Verify every byte; a damaged checkpoint is quarantined",
    response_class=StreamingResponse,
    responses=_VERIFIED,
)
async def verify_checkpoint(checkpoints: CheckpointsDep, job_id: JobId, step: Step) -> Response:
    found = await checkpoints.find(job_id, step)
    return StreamingResponse(_progress_lines(checkpoints, found), media_type=JSON_LINES)


@router.put(
    "/{step}/pin",
    summary="Pin a checkpoint against removal; idempotent",
    responses=documented(404, 409, 422, 503),
)
async def pin_checkpoint(checkpoints: CheckpointsDep, job_id: JobId, step: Step) -> CheckpointView:
    return await checkpoints.pin(job_id, step)


@router.delete(
    "/{step}/pin",
    summary="Unpin a checkpoint; idempotent",
    responses=documented(404, 422, 503),
)
async def unpin_checkpoint(
    checkpoints: CheckpointsDep, job_id: JobId, step: Step
) -> CheckpointView:
    return await checkpoints.unpin(job_id, step)


@router.delete(
    "/{step}",
    status_code=204,
    summary="Remove a checkpoint, unless it is pinned, needed, or the job's last",
    responses=documented(404, 409, 422, 503),
)
async def remove_checkpoint(checkpoints: CheckpointsDep, job_id: JobId, step: Step) -> None:
    await checkpoints.remove(job_id, step)


@router.get(
    "/{step}/export",
    summary="Export the model's parameters as one file",
    response_class=StreamingResponse,
    responses=_EXPORTED,
)
async def export_checkpoint(
    checkpoints: CheckpointsDep,
    job_id: JobId,
    step: Step,
    *,
    format: Annotated[Literal["safetensors"], Query()] = "safetensors",
    names: Annotated[
        Literal["own", "hf"], Query(description="hf: the names of Hugging Face's LlamaForCausalLM")
    ] = "own",
) -> Response:
    found = await checkpoints.export(job_id, step, hugging_face=names == "hf")
    headers = {
        "Content-Length": str(found.nbytes),
        "Content-Disposition": f'attachment; filename="{found.name}"',
    }
    return StreamingResponse(_chunks(found.file), media_type=SAFETENSORS, headers=headers)


async def _progress_lines(
    checkpoints: CheckpointService, found: FoundCheckpoint
) -> AsyncIterator[str]:
    progress: VerificationView
    async for progress in checkpoints.verify(found):
        yield progress.model_dump_json() + "\n"


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        file.seek(0)
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
