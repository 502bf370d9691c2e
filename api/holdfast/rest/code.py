"""`/code`: stores a user's folder of code, which specs name by its digest."""

from __future__ import annotations

from fastapi import APIRouter, Request

from holdfast.rest import bodies
from holdfast.rest.problems import documented
from holdfast.rest.services import ServicesDep
from holdfast_service.views.jobs import CodeView

router = APIRouter(prefix="/api/v1/code", tags=["code"])


@router.post(
    "",
    status_code=201,
    response_model=CodeView,
    summary="Upload a folder of code as a zip file; idempotent",
    responses=documented(413, 415, 422),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def send(request: Request, services: ServicesDep) -> CodeView:
    return await services.code.put(await bodies.package(request, services.max_code_bytes))
