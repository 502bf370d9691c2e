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
from holdfast_service.views.jobs import CheckpointsView, CheckpointView, VerificationView

router = APIRouter(prefix="/api/v1/jobs/{job_id}/checkpoints", tags=["checkpoints"])

Step = Annotated[int, Path(ge=0, le=2**53, description="the step that it is of")]

JSON_LINES = "application/x-ndjson"
SAFETENSORS = "application/octet-stream"
_PIECE = 1 << 20

_VERIFIED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "How far it is, a line each; the last one has `done`, or a `problem`.",
        "content": {JSON_LINES: {"schema": {"$ref": "#/components/schemas/VerificationView"}}},
    },
    **documented(404, 422),
}
_EXPORTED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The file, of known length. All bytes were verified before the first left.",
        "content": {SAFETENSORS: {"schema": {"type": "string", "format": "binary"}}},
    },
    **documented(404, 409, 422, 503),
}


@router.get(
    "",
    response_model=CheckpointsView,
    summary="What the job can go on from, by tier",
    responses=documented(404, 422),
)
async def list_checkpoints(checkpoints: CheckpointsDep, job_id: JobId) -> CheckpointsView:
    return await checkpoints.list(job_id)


@router.post(
    "/{step}/verify",
    summary="Read every byte; what is bad is quarantined",
    response_class=StreamingResponse,
    responses=_VERIFIED,
)
async def verify(checkpoints: CheckpointsDep, job_id: JobId, step: Step) -> Response:
    found = await checkpoints.find(job_id, step)
    return StreamingResponse(_words(checkpoints, found), media_type=JSON_LINES)


@router.put(
    "/{step}/pin",
    response_model=CheckpointView,
    summary="Let nobody remove it; again is the same",
    responses=documented(404, 409, 422, 503),
)
async def pin(checkpoints: CheckpointsDep, job_id: JobId, step: Step) -> CheckpointView:
    return await checkpoints.pin(job_id, step)


@router.delete(
    "/{step}/pin",
    response_model=CheckpointView,
    summary="Pin it no more; again is the same",
    responses=documented(404, 422, 503),
)
async def unpin(checkpoints: CheckpointsDep, job_id: JobId, step: Step) -> CheckpointView:
    return await checkpoints.unpin(job_id, step)


@router.delete(
    "/{step}",
    status_code=204,
    summary="Remove it, unless it is pinned, needed, or all that the job has",
    responses=documented(404, 409, 422, 503),
)
async def remove(checkpoints: CheckpointsDep, job_id: JobId, step: Step) -> None:
    await checkpoints.remove(job_id, step)


@router.get(
    "/{step}/export",
    summary="The model's parameters, whole, as one file",
    response_class=StreamingResponse,
    responses=_EXPORTED,
)
async def export(
    checkpoints: CheckpointsDep,
    job_id: JobId,
    step: Step,
    *,
    format: Annotated[Literal["safetensors"], Query()] = "safetensors",
    names: Annotated[
        Literal["own", "hf"], Query(description="hf: as Hugging Face's LlamaForCausalLM has them")
    ] = "own",
) -> Response:
    found = await checkpoints.export(job_id, step, hugging_face=names == "hf")
    headers = {
        "Content-Length": str(found.nbytes),
        "Content-Disposition": f'attachment; filename="{found.name}"',
    }
    return StreamingResponse(_pieces(found.file), media_type=SAFETENSORS, headers=headers)


async def _words(checkpoints: CheckpointService, found: FoundCheckpoint) -> AsyncIterator[str]:
    word: VerificationView
    async for word in checkpoints.verify(found):
        yield word.model_dump_json() + "\n"


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        file.seek(0)
        while piece := file.read(_PIECE):
            yield piece
