"""`/code`: stores users' folders of code, which specs name by their digests."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from holdfast.rest.http import bodies
from holdfast.rest.http.problems import documented
from holdfast.rest.services import ServicesDep
from holdfast_service.views.jobs import CodeView

Digest = Annotated[
    str, Path(pattern="^sha256:[0-9a-f]{64}$", description="The `code` of the upload's answer.")
]

router = APIRouter(prefix="/api/v1/code", tags=["code"])


@router.post(
    "",
    status_code=201,
    summary="Upload a folder of code as a zip file; idempotent",
    responses=documented(408, 409, 413, 415, 422, 503),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def upload_code(request: Request, services: ServicesDep) -> CodeView:
    return await services.code.put(await bodies.package(request))


@router.get(
    "/{digest}",
    response_class=Response,
    summary="A stored folder of code as the zip file that was uploaded",
    responses={
        200: {"content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}}},
        **documented(404, 422),
    },
)
async def download_code(digest: Digest, services: ServicesDep) -> Response:
    return Response(await services.code.get(digest), media_type="application/zip")


@router.head(
    "/{digest}",
    status_code=200,
    response_class=Response,
    summary="Whether a folder of code is stored; it is kept for its job, as if it was sent again",
    responses=documented(404, 422),
)
async def probe_code(digest: Digest, services: ServicesDep) -> Response:
    await services.code.keep(digest)
    return Response(media_type="application/zip")
