"""`/operations`: long work; and `/jobs/{id}/checkpoints/{step}`: `verify` and `export`, which start
some."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Response
from starlette.datastructures import Headers
from starlette.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from holdfast.rest.http.paging import Cursor, PageSize
from holdfast.rest.http.problems import ProblemError, documented
from holdfast.rest.routes.checkpoints import Step
from holdfast.rest.routes.jobs import JobId
from holdfast.rest.services import ServicesDep
from holdfast_service.job_model.operations import ExportedWeights, ExportForm, ParameterNames
from holdfast_service.operations.export_files import Content
from holdfast_service.views.operations import OperationPage, OperationView

PREFIX = "/api/v1/operations"
router = APIRouter(tags=["operations"])

OperationId = Annotated[str, Path(max_length=64, description="`id` of the operation")]
_SAFETENSORS = "application/octet-stream"
_TAR = "application/x-tar"
_FILE = {"schema": {"type": "string", "format": "binary"}}
_RANGE_REFUSED = (400, 416)
_RETRY_AFTER_S = 1
_STARTED: dict[int | str, dict[str, Any]] = {
    202: {
        "description": "The operation; one that does the same already is the answer, too.",
        "headers": {
            "Location": {"description": "of the operation", "schema": {"type": "string"}},
            "Retry-After": {
                "description": "seconds until the next look at it",
                "schema": {"type": "integer"},
            },
        },
    },
    200: {"description": "The same export, whose file is there already."},
    **documented(404, 422, 503),
}
_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The file, with its length. All its bytes are verified.",
        "content": {_SAFETENSORS: _FILE, _TAR: _FILE},
    },
    206: {
        "description": "The part of the file that `Range` names, if `If-Range` is its `ETag`.",
        "content": {_SAFETENSORS: _FILE, _TAR: _FILE},
    },
    **documented(404, 409, 416, 422),
}


@router.post(
    "/api/v1/jobs/{job_id}/checkpoints/{step}/verify",
    status_code=202,
    summary="Verify every byte; a damaged checkpoint is quarantined",
    tags=["checkpoints"],
    responses=_STARTED,
)
async def verify_checkpoint(
    services: ServicesDep, response: Response, job_id: JobId, step: Step
) -> OperationView:
    return _started(response, await services.operations.verify(job_id, step))


@router.post(
    "/api/v1/jobs/{job_id}/checkpoints/{step}/export",
    status_code=202,
    summary="Write the model's parameters to one file",
    tags=["checkpoints"],
    responses=_STARTED,
)
async def export_checkpoint(
    services: ServicesDep,
    response: Response,
    job_id: JobId,
    step: Step,
    *,
    format: Annotated[Literal["safetensors"], Query()] = "safetensors",
    names: Annotated[
        ParameterNames,
        Query(
            description="own: one file of safetensors. hf: a tar file of a folder that Hugging "
            "Face's transformers loads, with its names"
        ),
    ] = ParameterNames.OWN,
    weights: Annotated[
        ExportedWeights, Query(description="average: the moving averages of `train.ema`")
    ] = ExportedWeights.TRAINED,
) -> OperationView:
    form = ExportForm(names, weights)
    return _started(response, await services.operations.export(job_id, step, form))


@router.get(PREFIX, summary="Operations, newest first", responses=documented(400, 404, 422))
async def list_operations(
    services: ServicesDep,
    *,
    job: Annotated[
        str | None, Query(max_length=64, description="only of the job with this id")
    ] = None,
    active: Annotated[
        bool | None, Query(description="only those that have not ended; or only those that have")
    ] = None,
    cursor: Cursor = None,
    limit: PageSize = 100,
) -> OperationPage:
    return await services.operations.list(job_id=job, active=active, cursor=cursor, limit=limit)


@router.get(
    PREFIX + "/{operation_id}",
    summary="An operation: its state, its progress, its result",
    responses=documented(404, 422),
)
async def get_operation(
    services: ServicesDep, response: Response, operation_id: OperationId
) -> OperationView:
    found = await services.operations.get(operation_id)
    if not found.state.ended:
        response.headers["Retry-After"] = str(_RETRY_AFTER_S)
    return found


@router.post(
    PREFIX + "/{operation_id}/cancel",
    summary="Cancel an operation; idempotent",
    responses=documented(404, 409, 422),
)
async def cancel_operation(services: ServicesDep, operation_id: OperationId) -> OperationView:
    return await services.operations.cancel(operation_id)


@router.get(
    PREFIX + "/{operation_id}/content",
    summary="The file of an export",
    response_class=FileResponse,
    responses=_CONTENT,
)
async def get_operation_content(services: ServicesDep, operation_id: OperationId) -> Response:
    return _ContentResponse(await services.operations.content(operation_id))


def _started(response: Response, operation: OperationView) -> OperationView:
    response.headers["Location"] = f"{PREFIX}/{operation.id}"
    if operation.state.ended:
        response.status_code = 200
    else:
        response.headers["Retry-After"] = str(_RETRY_AFTER_S)
    return operation


class _ContentResponse(FileResponse):
    """Sends an open file, or a range of it, and closes it: it may be removed meanwhile."""

    chunk_size = 1 << 20

    def __init__(self, content: Content) -> None:
        number = content.file.fileno()
        super().__init__(
            f"/proc/self/fd/{number}",
            headers={"ETag": f'"{content.view.digest}"'},
            media_type=_TAR if content.view.name.endswith(".tar") else _SAFETENSORS,
            filename=content.view.name,
            stat_result=os.fstat(number),
        )
        self._file = content.file

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
