"""`/jobs`: submit, list, show, cancel, pause, resume, resize."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request, Response

from holdfast.rest import bodies
from holdfast.rest.problems import documented
from holdfast.rest.services import JobsDep, OverviewDep, ServicesDep
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.sort_order import Sort
from holdfast_service.views.jobs import JobPage, JobView
from holdfast_service.views.lists import JobRowPage, SpecDifferenceView, ValidSpecView

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"])

JobId = Annotated[str, Path(description="id of the job", max_length=64)]

EXAMPLE_SPEC: dict[str, Any] = {
    "name": "stdlib-lm",
    "recipe": "pretrain",
    "model": {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 2, "sequence_length": 256},
    "data": {"source": "python-stdlib", "tokenizer": "bytes"},
    "train": {"steps": 300, "global_batch": 16, "micro_batch": 4, "seed": 7},
    "parallel": {"dp_shard": 2, "tp": 2},
    "resources": {"workers_per_node": 2, "standby_nodes": 1},
}
_SPEC = {"schema": {"$ref": "#/components/schemas/JobSpec"}, "example": EXAMPLE_SPEC}

_SPEC_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": _SPEC, "application/yaml": _SPEC},
    }
}


class ListView(StrEnum):
    """The level of detail of a list of jobs."""

    JOB = "job"
    ROW = "row"


@router.post(
    "",
    status_code=201,
    summary="Submit a job",
    responses={
        200: {"model": JobView, "description": "The first job of this Idempotency-Key."},
        201: {
            "description": "Accepted: the job is stored durably and will start.",
            "headers": {
                "Location": {"description": "path of the job", "schema": {"type": "string"}}
            },
        },
        **documented(400, 409, 413, 415, 422),
    },
    openapi_extra=_SPEC_BODY,
)
async def submit(
    request: Request,
    response: Response,
    services: ServicesDep,
    idempotency_key: Annotated[
        str | None,
        Header(description="the same key and document give the same job", max_length=200),
    ] = None,
) -> JobView:
    document = await bodies.document(request, services)
    job, created = await services.jobs.submit(document, idempotency_key)
    response.status_code = 201 if created else 200
    response.headers["Location"] = f"/api/v1/jobs/{job.id}"
    return job


@router.get(
    "",
    summary="List jobs: in full, newest first; or as rows, in any order",
    responses=documented(400, 422),
)
async def list_jobs(
    services: ServicesDep,
    *,
    view: Annotated[
        ListView,
        Query(description="`row`: summaries, with counts; `q`, `owner` and `sort` need it"),
    ] = ListView.JOB,
    q: Annotated[
        str | None,
        Query(max_length=200, description="part of a name or owner, or the start of an id"),
    ] = None,
    owner: Annotated[str | None, Query(max_length=64, description="exact owner")] = None,
    sort: Annotated[Sort, Query()] = Sort.CREATED,
    cursor: Annotated[
        str | None, Query(max_length=1000, description="`next_cursor` of the previous page")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    state: Annotated[list[State] | None, Query(description="one or more states")] = None,
    name: Annotated[str | None, Query(description="exact name; not for `view=row`")] = None,
    id: Annotated[
        list[str] | None,
        Query(max_length=500, description="only jobs with these ids; not for `view=row`"),
    ] = None,
) -> JobPage | JobRowPage:
    if view is ListView.ROW:
        return await services.overview.rows(
            q=q, owner=owner, states=state or (), sort=sort, limit=limit, cursor=cursor
        )
    return await services.jobs.list(cursor=cursor, limit=limit, state=state, name=name, ids=id)


@router.post(
    "/validate",
    summary="Validate a spec: return its resolved form or its faults; creates nothing",
    responses=documented(400, 413, 415, 422),
    openapi_extra=_SPEC_BODY,
)
async def validate(request: Request, services: ServicesDep) -> ValidSpecView:
    document = await bodies.document(request, services)
    spec = await services.jobs.validate(document)
    return ValidSpecView(spec=spec.model_dump(mode="json"))


@router.get("/{job_id}", summary="Show a job", responses=documented(404, 422))
async def get(jobs: JobsDep, job_id: JobId) -> JobView:
    return await jobs.get(job_id)


@router.post(
    "/{job_id}/cancel",
    status_code=202,
    summary="Cancel a job; idempotent",
    responses=documented(404, 409, 422),
)
async def cancel(
    jobs: JobsDep,
    job_id: JobId,
    now: Annotated[bool, Query(description="do not wait for a last checkpoint")] = False,
) -> JobView:
    return await jobs.cancel(job_id, now)


@router.post(
    "/{job_id}/pause",
    status_code=202,
    summary="Pause a job: it saves its state and leaves the cluster; idempotent",
    responses=documented(404, 409, 422),
)
async def pause(jobs: JobsDep, job_id: JobId) -> JobView:
    return await jobs.pause(job_id)


@router.post(
    "/{job_id}/resume",
    status_code=202,
    summary="Resume a paused job from its newest checkpoint; idempotent",
    responses=documented(404, 409, 422),
)
async def resume(jobs: JobsDep, job_id: JobId) -> JobView:
    return await jobs.resume(job_id)


@router.post(
    "/{job_id}/resize",
    status_code=202,
    summary="Order the size of an elastic job; idempotent",
    responses=documented(404, 409, 422),
)
async def resize(
    jobs: JobsDep,
    job_id: JobId,
    nodes: Annotated[
        int | None,
        Query(ge=1, description="most nodes that train; without it, as many as the spec allows"),
    ] = None,
) -> JobView:
    return await jobs.resize(job_id, nodes)


@router.get(
    "/{job_id}/spec/diff",
    summary="Where the resolved specs of two jobs differ",
    responses=documented(404, 422),
)
async def difference(
    overview: OverviewDep,
    job_id: JobId,
    against: Annotated[str, Query(description="id of the other job", max_length=64)],
) -> Sequence[SpecDifferenceView]:
    return await overview.difference(job_id, against)
