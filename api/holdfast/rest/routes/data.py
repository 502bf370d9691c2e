"""`/data`: the sources of a spec, before a job reads them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from holdfast.rest.http import bodies
from holdfast.rest.http.problems import documented
from holdfast.rest.services import ServicesDep
from holdfast_service.services.token_sets import MOST_SAMPLES
from holdfast_service.views.token_sets import DataPreparationView, DataSamplesView

router = APIRouter(prefix="/api/v1/data", tags=["data"])


@router.post(
    "/prepare",
    summary="Turn the sources of a spec into tokens, or go on: how far they are; idempotent",
    responses=documented(400, 408, 413, 415, 422, 503),
    openapi_extra=bodies.SPEC_BODY,
)
async def prepare_data(request: Request, services: ServicesDep) -> DataPreparationView:
    document = await bodies.document(request, services)
    return await services.token_sets.prepare(document)


@router.post(
    "/samples",
    summary="The first samples of a spec with prepared sources, as the model will see them",
    responses=documented(400, 408, 409, 413, 415, 422, 503),
    openapi_extra=bodies.SPEC_BODY,
)
async def show_samples(
    request: Request,
    services: ServicesDep,
    count: Annotated[int, Query(ge=1, le=MOST_SAMPLES)] = 3,
) -> DataSamplesView:
    document = await bodies.document(request, services)
    return await services.token_sets.samples(document, count)
