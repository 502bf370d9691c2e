"""`/jobs/{id}/events` and `/logs`: numbered feeds, as a page or a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse

from holdfast.rest.http import streams
from holdfast.rest.http.paging import MAX_NUMBER, After
from holdfast.rest.http.problems import documented
from holdfast.rest.routes.history import MaybeTime
from holdfast.rest.routes.jobs import JobId
from holdfast.rest.services import ServicesDep
from holdfast_service.errors import JobNotFound
from holdfast_service.job_model.log_filters import (
    MAX_REGEX_LENGTH,
    LogFilter,
    compile_pattern,
)
from holdfast_service.job_model.log_levels import LogLevel
from holdfast_service.live.followers import JobFeed
from holdfast_service.views.pages import EventPage, LogPage

router = APIRouter(prefix="/api/v1/jobs/{job_id}", tags=["feeds"])


async def _by_accept(response: Response) -> None:
    response.headers["Vary"] = "Accept"


BY_ACCEPT = [Depends(_by_accept)]


async def _log_filter(
    rank: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
    attempt: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
    since: MaybeTime = None,
    until: MaybeTime = None,
    level: Annotated[
        LogLevel | None, Query(description="this level or worse, as marked in the lines")
    ] = None,
    grep: Annotated[
        str | None,
        Query(max_length=MAX_REGEX_LENGTH, description="regular expression, in RE2's syntax"),
    ] = None,
) -> LogFilter:
    return LogFilter(rank, attempt, since, until, level, compile_pattern(grep))


LogFilterDep = Annotated[LogFilter, Depends(_log_filter)]

FromLine = Annotated[int, Query(ge=0, le=MAX_NUMBER, description="only numbers above this")]

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A page; or, with `Accept: text/event-stream`, a stream of all items. "
        "A stream resumes after `Last-Event-ID` and ends when the job has ended.",
        "content": {streams.MEDIA_TYPE: {"schema": {"type": "string"}}},
    },
    204: {"description": "Stream only: the job has ended and everything was sent."},
    **documented(400, 404, 422),
}


@router.get(
    "/events",
    response_model=EventPage,
    summary="Numbered events",
    responses=_STREAM,
    dependencies=BY_ACCEPT,
)
async def list_events(
    request: Request,
    services: ServicesDep,
    job_id: JobId,
    *,
    after: After,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> EventPage | Response:
    position = streams.requested(request, after)
    if not position.stream:
        return await services.jobs.history.events(job_id, after, limit)

    async def read(last: int) -> streams.StreamPart:
        return streams.event_part(await services.jobs.history.events(job_id, last, streams.PAGE))

    first = await read(position.after)
    if first.over and not first.encoded:
        return Response(status_code=204)  # makes a browser stop reconnecting: no more events follow
    return streams.response(streams.follow(services, job_id, JobFeed.EVENTS, first, read))


@router.get(
    "/logs",
    response_model=LogPage,
    summary="Log lines of the ranks",
    responses=_STREAM,
    dependencies=BY_ACCEPT,
)
async def list_logs(
    request: Request,
    services: ServicesDep,
    job_id: JobId,
    *,
    log_filter: LogFilterDep,
    after: After,
    before: Annotated[
        int | None,
        Query(ge=1, le=2**53, description="page backwards: the last lines before this number"),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    tail: Annotated[
        int | None, Query(ge=0, le=10_000, description="only this many last lines")
    ] = None,
) -> LogPage | Response:
    reader = services.jobs.log_reader
    position = streams.requested(request, after)
    if position.stream:
        before, limit = None, min(limit, streams.PAGE)
    tail = tail if position.after == 0 else None  # a resumed stream continues at its position
    first = await reader.page(
        job_id, log_filter, after=position.after, before=before, limit=limit, tail=tail
    )
    if not position.stream:
        return first

    async def read(last: int) -> streams.StreamPart:
        return streams.log_part(await reader.page(job_id, log_filter, after=last, limit=limit))

    async def messages(page: LogPage) -> AsyncIterator[bytes]:
        with suppress(JobNotFound):  # it was removed: the stream closes without `end`
            while page.first_line is not None and len(page.items) < (tail or 0):
                yield streams.KEEP_ALIVE
                if services.stopping.is_set():
                    return
                older = await reader.page(
                    job_id,
                    log_filter,
                    after=position.after,
                    before=page.first_line,
                    limit=limit,
                    tail=(tail or 0) - len(page.items),
                )
                page = page.model_copy(
                    update={"items": (*older.items, *page.items), "first_line": older.first_line}
                )
            first, query = streams.log_part(page), request.url.query
            async for piece in streams.follow(services, job_id, JobFeed.LOGS, first, read, query):
                yield piece

    return streams.response(messages(first))


@router.get(
    "/logs/download",
    summary="All log lines that match, as text",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
        **documented(404, 422),
    },
)
async def download_logs(
    services: ServicesDep, job_id: JobId, *, log_filter: LogFilterDep, after: FromLine = 0
) -> StreamingResponse:
    text = await services.jobs.log_reader.text(job_id, log_filter, after=after)
    headers = {
        "Content-Disposition": f'attachment; filename="{job_id}.log"',
        "X-Content-Type-Options": "nosniff",
    }
    return StreamingResponse(text, media_type="text/plain; charset=utf-8", headers=headers)
