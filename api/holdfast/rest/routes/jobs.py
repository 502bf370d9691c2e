"""`/jobs`: submit, list, show, change, cancel, pause, resume, resize, remove.

The `ETag` of a job is its generation: it changes when users change the job, and not with its
progress. A command with `If-Match` takes effect only on the job that its sender has seen.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response

from holdfast.rest.http import bodies
from holdfast.rest.http.paging import Cursor
from holdfast.rest.http.problems import documented
from holdfast.rest.services import ServicesDep
from holdfast.schemas import JobChanges
from holdfast_service.errors import InvalidParameters
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.sort_order import Sort
from holdfast_service.services.job_commands import Generations
from holdfast_service.store.listing import Filters
from holdfast_service.views.jobs import JobView, RemovedJobView
from holdfast_service.views.meshes import ValidSpecView
from holdfast_service.views.pages import CancelledJobPage, JobPage, SpecDifferencePage

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"])
SCHEMAS = (JobSpec,)

JobId = Annotated[str, Path(description="id of the job", max_length=64)]

REPLAYED = "Idempotency-Replayed"
REPLAYED_HEADER = {
    REPLAYED: {
        "description": "`true`: an earlier request with this key has done it",
        "schema": {"type": "string"},
    }
}
_CREATED: dict[int | str, dict[str, Any]] = {
    200: {
        "model": JobView,
        "description": "The first job of this Idempotency-Key.",
        "headers": REPLAYED_HEADER,
    },
    201: {
        "description": "Accepted: the job is stored durably and will start.",
        "headers": {"Location": {"description": "path of the job", "schema": {"type": "string"}}},
    },
}
_SHOWN: dict[int | str, dict[str, Any]] = {
    200: {
        "headers": {"ETag": {"description": "generation of the job", "schema": {"type": "string"}}}
    }
}
_ETAG = re.compile(r'"\d{1,18}"')
_ANY_ETAG = re.compile(r'(W/)?"[^"]*"')
IdempotencyKey = Annotated[
    str | None,
    Header(
        description="the same key and request give the same job",
        max_length=200,
    ),
]


def _filters(
    *,
    q: Annotated[
        str | None,
        Query(max_length=200, description="part of a name or owner, or the start or end of an id"),
    ] = None,
    name: Annotated[str | None, Query(max_length=200, description="exact name")] = None,
    owner: Annotated[str | None, Query(max_length=64, description="exact owner")] = None,
    state: Annotated[list[State] | None, Query(description="one or more states")] = None,
    id: Annotated[
        list[str] | None, Query(max_length=500, description="only jobs with these ids")
    ] = None,
) -> Filters:
    return Filters(
        q=q, name=name, owner=owner, ids=frozenset(id or ()), states=frozenset(state or ())
    )


FiltersDep = Annotated[Filters, Depends(_filters)]


async def _expected(
    if_match: Annotated[
        list[str] | None,
        Header(description="`ETag` of the job as last read: refuse if users have changed it since"),
    ] = None,
) -> Generations:
    if if_match is None:
        return None
    tags = [tag.strip() for line in if_match for tag in line.split(",")]
    if tags == ["*"]:
        return None
    if not all(map(_ANY_ETAG.fullmatch, tags)):
        why = 'must be an ETag of the job, such as "3", or *'
        raise InvalidParameters(
            f"If-Match {why}", faults=[{"path": "header.if-match", "message": why}]
        )
    return frozenset(int(tag.strip('"')) for tag in tags if _ETAG.fullmatch(tag))


Expected = Annotated[Generations, Depends(_expected)]


class WithCheckpoints(StrEnum):
    KEEP = "keep"
    REMOVE = "remove"


@router.post(
    "",
    status_code=201,
    summary="Submit a job",
    responses={**_CREATED, **documented(400, 408, 409, 413, 415, 422, 503)},
    openapi_extra=bodies.SPEC_BODY,
)
async def submit_job(
    request: Request,
    response: Response,
    services: ServicesDep,
    idempotency_key: IdempotencyKey = None,
) -> JobView:
    document = await bodies.document(request, services)
    return _created(response, *await services.jobs.submit(document, idempotency_key))


@router.get(
    "", summary="List jobs, newest first or in another order", responses=documented(400, 422)
)
async def list_jobs(
    services: ServicesDep,
    *,
    filters: FiltersDep,
    sort: Annotated[Sort, Query()] = Sort.CREATED,
    cursor: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> JobPage:
    return await services.overview.rows(filters, sort=sort, limit=limit, cursor=cursor)


@router.post(
    "/validate",
    summary="Validate a spec: return its resolved form, or its faults; creates nothing",
    responses=documented(400, 408, 413, 415, 422, 503),
    openapi_extra=bodies.SPEC_BODY,
)
async def validate_spec(request: Request, services: ServicesDep) -> ValidSpecView:
    document = await bodies.document(request, services)
    return await services.jobs.validate(document)


@router.post(
    "/cancel",
    status_code=202,
    summary="Cancel all jobs that match; idempotent",
    responses=documented(400, 422),
)
async def cancel_jobs(
    services: ServicesDep,
    *,
    filters: FiltersDep,
    now: Annotated[bool, Query(description="do not wait for last checkpoints")] = False,
    cursor: Cursor = None,
) -> CancelledJobPage:
    return await services.jobs.cancel_matching(filters, now, cursor)


@router.get("/{job_id}", summary="Show a job", responses={**_SHOWN, **documented(404, 422)})
async def get_job(response: Response, services: ServicesDep, job_id: JobId) -> JobView:
    return _tagged(response, await services.jobs.get(job_id))


@router.patch(
    "/{job_id}",
    summary="Change labels and the priority of a job",
    responses={**_SHOWN, **documented(404, 412, 422)},
)
async def change_job(
    response: Response,
    services: ServicesDep,
    job_id: JobId,
    changes: JobChanges,
    expected: Expected,
) -> JobView:
    changed = await services.jobs.change(job_id, changes.labels, changes.priority, expected)
    return _tagged(response, changed)


@router.delete(
    "/{job_id}",
    summary="Remove an ended job with its history",
    responses=documented(404, 409, 412, 422, 503),
)
async def remove_job(
    services: ServicesDep,
    job_id: JobId,
    expected: Expected,
    checkpoints: Annotated[
        WithCheckpoints, Query(description="what becomes of its checkpoints in the remote tier")
    ] = WithCheckpoints.KEEP,
) -> RemovedJobView:
    remove = checkpoints is WithCheckpoints.REMOVE
    return await services.removal.remove(job_id, with_checkpoints=remove, expected=expected)


@router.post(
    "/{job_id}/cancel",
    status_code=202,
    summary="Cancel a job; idempotent",
    responses=documented(404, 409, 412, 422),
)
async def cancel_job(
    response: Response,
    services: ServicesDep,
    job_id: JobId,
    expected: Expected,
    now: Annotated[bool, Query(description="do not wait for a last checkpoint")] = False,
) -> JobView:
    return _tagged(response, await services.jobs.cancel(job_id, now, expected))


@router.post(
    "/{job_id}/pause",
    status_code=202,
    summary="Pause a job: it saves its state and leaves the cluster; idempotent",
    responses=documented(404, 409, 412, 422),
)
async def pause_job(
    response: Response, services: ServicesDep, job_id: JobId, expected: Expected
) -> JobView:
    return _tagged(response, await services.jobs.pause(job_id, expected))


@router.post(
    "/{job_id}/resume",
    status_code=202,
    summary="Resume a paused job from its newest checkpoint; idempotent",
    responses=documented(404, 409, 412, 422),
)
async def resume_job(
    response: Response, services: ServicesDep, job_id: JobId, expected: Expected
) -> JobView:
    return _tagged(response, await services.jobs.resume(job_id, expected))


@router.post(
    "/{job_id}/restart",
    status_code=202,
    summary="Save a job's state and let new processes continue it, in the present build",
    responses=documented(404, 409, 412, 422),
)
async def restart_job(
    response: Response, services: ServicesDep, job_id: JobId, expected: Expected
) -> JobView:
    return _tagged(response, await services.jobs.restart(job_id, expected))


@router.post(
    "/{job_id}/resize",
    status_code=202,
    summary="Order the size of an elastic job; idempotent",
    responses=documented(404, 409, 412, 422),
)
async def resize_job(
    response: Response,
    services: ServicesDep,
    job_id: JobId,
    expected: Expected,
    nodes: Annotated[
        int | None,
        Query(ge=1, description="most nodes that train; without it, as many as the spec allows"),
    ] = None,
) -> JobView:
    return _tagged(response, await services.jobs.resize(job_id, nodes, expected))


@router.post(
    "/{job_id}/replay",
    status_code=201,
    summary="Submit a replay of the steps so far, undisturbed, on the same meshes",
    responses={**_CREATED, **documented(404, 409, 422)},
)
async def replay_job(
    response: Response,
    services: ServicesDep,
    job_id: JobId,
    idempotency_key: IdempotencyKey = None,
) -> JobView:
    return _created(response, *await services.replays.replay(job_id, idempotency_key))


@router.get(
    "/{job_id}/spec/diff",
    summary="Where the resolved specs of two jobs differ",
    responses=documented(404, 422),
)
async def compare_specs(
    services: ServicesDep,
    job_id: JobId,
    against: Annotated[str, Query(description="id of the other job", max_length=64)],
) -> SpecDifferencePage:
    return await services.overview.difference(job_id, against)


def _created(response: Response, job: JobView, created: bool) -> JobView:
    response.status_code = 201 if created else 200
    response.headers["Location"] = f"/api/v1/jobs/{job.id}"
    if not created:
        response.headers[REPLAYED] = "true"
    return _tagged(response, job)


def _tagged(response: Response, job: JobView) -> JobView:
    response.headers["ETag"] = f'"{job.generation}"'
    response.headers["Cache-Control"] = "no-store"  # its progress does not change the ETag
    return job
