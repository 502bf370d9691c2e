"""`/jobs/{id}/checkpoints`: list, verify, pin, remove, export."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Response
from starlette.datastructures import Headers
from starlette.responses import FileResponse, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from holdfast.rest.jobs import JobId
from holdfast.rest.problems import ProblemError, documented
from holdfast.rest.services import CheckpointsDep
from holdfast_service.services.checkpoints import CheckpointService, Export, FoundCheckpoint
from holdfast_service.views.jobs import CheckpointView, VerificationView
from holdfast_service.views.pages import CheckpointPage

router = APIRouter(prefix="/api/v1/jobs/{job_id}/checkpoints", tags=["checkpoints"])

Step = Annotated[int, Path(ge=0, le=2**53, description="step of the checkpoint")]

JSON_LINES = "application/x-ndjson"
SAFETENSORS = "application/octet-stream"
_RANGE_REFUSED = (400, 416)

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
    206: {
        "description": "The part of the file that `Range` names, if `If-Range` is its `ETag`.",
        "content": {SAFETENSORS: {"schema": {"type": "string", "format": "binary"}}},
    },
    **documented(404, 409, 416, 422, 503),
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
    return _ExportResponse(found)


async def _progress_lines(
    checkpoints: CheckpointService, found: FoundCheckpoint
) -> AsyncIterator[str]:
    progress: VerificationView
    async for progress in checkpoints.verify(found):
        yield progress.model_dump_json() + "\n"


class _ExportResponse(FileResponse):
    """Sends a file without a name, or a range of it, and closes it."""

    chunk_size = 1 << 20

    def __init__(self, export: Export) -> None:
        number = export.file.fileno()
        super().__init__(
            f"/proc/self/fd/{number}",
            headers={"ETag": f'"{export.digest}"'},
            media_type=SAFETENSORS,
            filename=export.name,
            stat_result=os.fstat(number),
        )
        self._file = export.file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_unless_refused(message: Message) -> None:
            if message.get("status") in _RANGE_REFUSED:
                nbytes, asked = self.headers["content-length"], Headers(scope=scope)["range"]
                raise ProblemError(
                    416,
                    "range_not_satisfiable",
                    f"{asked!r} is no part of a file of {nbytes} bytes: write bytes=FIRST-LAST",
                    headers={"Content-Range": f"bytes */{nbytes}"},
                )
            await send(message)

        if not Headers(scope=scope).get("range", "").startswith("bytes="):  # no unit that is known
            headers = [header for header in scope["headers"] if header[0] != b"range"]
            scope = {**scope, "headers": headers}
        with self._file:
            await super().__call__(scope, receive, send_unless_refused)
