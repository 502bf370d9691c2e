"""`/jobs/{id}/faults`: inject faults into a running job, and list the injected faults."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response

from holdfast.rest.http import bodies
from holdfast.rest.http.paging import AfterNumber, PageSize
from holdfast.rest.http.problems import documented
from holdfast.rest.routes.jobs import REPLAYED, REPLAYED_HEADER, JobId
from holdfast.rest.services import ServicesDep
from holdfast_service.views.incidents import FaultView
from holdfast_service.views.pages import FaultPage
from holdfast_workers.fault_injection.kinds import Injection

router = APIRouter(prefix="/api/v1/jobs/{job_id}/faults", tags=["faults"])
SCHEMAS = (Injection,)

EXAMPLE: dict[str, Any] = {"kind": "kill", "rank": 1, "at_step": 50, "phase": "backward"}
_BODY = {"schema": {"$ref": "#/components/schemas/Injection"}, "example": EXAMPLE}


@router.post(
    "",
    status_code=202,
    summary="Inject a fault, if the server allows it",
    responses={
        200: {
            "model": FaultView,
            "description": "The first fault of this Idempotency-Key.",
            "headers": REPLAYED_HEADER,
        },
        202: {"description": "Stored durably; the fault is injected once."},
        **documented(400, 403, 404, 409, 413, 415, 422),
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": _BODY, "application/yaml": _BODY},
        }
    },
)
async def inject_fault(
    request: Request,
    response: Response,
    services: ServicesDep,
    job_id: JobId,
    idempotency_key: Annotated[
        str | None,
        Header(description="the same key and document give the same fault", max_length=200),
    ] = None,
) -> FaultView:
    document = await bodies.document(request, services)
    fault, created = await services.injections.inject(job_id, document, idempotency_key)
    response.status_code = 202 if created else 200
    if not created:
        response.headers[REPLAYED] = "true"
    return fault


@router.get("", summary="The requested faults", responses=documented(400, 404, 422))
async def list_faults(
    services: ServicesDep, job_id: JobId, *, after: AfterNumber, limit: PageSize = 200
) -> FaultPage:
    return await services.injections.list(job_id, after, limit)
