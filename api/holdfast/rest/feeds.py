"""`/jobs/{id}/events` and `/logs`: numbered feeds, as a page or as a stream."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from holdfast.rest import streams
from holdfast.rest.jobs import JobId
from holdfast.rest.problems import documented
from holdfast.rest.services import ServicesDep
from holdfast_service.views import EventPage, LogPage

router = APIRouter(prefix="/api/v1/jobs/{job_id}", tags=["feeds"])

After = Annotated[int, Query(ge=0, le=2**53, description="only what has a number above this one")]

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A page; or, with `Accept: text/event-stream`, everything as it comes. "
        "A stream resumes after `Last-Event-ID` and ends when the job is over.",
        "content": {streams.MEDIA_TYPE: {"schema": {"type": "string"}}},
    },
    204: {"description": "Stream only: the job is over and there is nothing more to send."},
    **documented(404, 422),
}


@router.get("/events", response_model=EventPage, summary="Numbered events", responses=_STREAM)
async def events(
    request: Request,
    services: ServicesDep,
    job_id: JobId,
    *,
    after: After = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> EventPage | Response:
    wanted = streams.asked(request, after)
    if wanted.stream:
        return await streams.event_stream(services, job_id, wanted.after)
    return await services.jobs.events(job_id, after, limit)


@router.get("/logs", response_model=LogPage, summary="Log lines of the ranks", responses=_STREAM)
async def logs(
    request: Request,
    services: ServicesDep,
    job_id: JobId,
    *,
    rank: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
    attempt: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
    after: After = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    tail: Annotated[int | None, Query(ge=0, le=10_000, description="the last lines only")] = None,
) -> LogPage | Response:
    jobs = services.jobs
    wanted = streams.asked(request, after)
    tail = tail if wanted.after == 0 else None  # a stream that resumes goes on where it was
    first = await jobs.logs(
        job_id, rank=rank, attempt=attempt, after=wanted.after, limit=limit, tail=tail
    )
    if not wanted.stream:
        return first

    async def following(last_line: int) -> LogPage:
        return await jobs.logs(job_id, rank=rank, attempt=attempt, after=last_line, limit=limit)

    async def ended() -> bool:
        return (await jobs.get(job_id)).state.terminal

    return streams.log_stream(services, following, first, ended)
