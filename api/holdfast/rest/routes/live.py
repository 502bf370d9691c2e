"""`/live`: the stream of a dashboard page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse

from holdfast.rest.http import streams
from holdfast.rest.http.problems import ProblemError, documented
from holdfast.rest.services import ServicesDep
from holdfast_service.live.stream_cursor import Batch, Position
from holdfast_service.views.live import LiveHello, LiveLogs, LiveMetrics, LiveRemoved, LiveReset

router = APIRouter(prefix="/api/v1/live", tags=["feeds"])
SCHEMAS = (LiveHello, LiveMetrics, LiveLogs, LiveRemoved, LiveReset)


@router.get(
    "",
    summary="All changes as server-sent events",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "First `hello` (LiveHello); then `row` (JobRow) of every job when it "
            "changes, and `removed` (LiveRemoved) when it is removed; with `job` also `event` "
            "(EventView), `metrics` (LiveMetrics), `ranks` (RanksView), `job` (JobView) and `logs` "
            "(LiveLogs) of that job; `reset` (LiveReset) if a stream cannot be resumed without a "
            "gap. A stream resumes after `Last-Event-ID`, on any server. Fetch the existing data "
            "after `hello`.",
            "content": {streams.MEDIA_TYPE: {"schema": {"type": "string"}}},
        },
        **documented(404, 406, 422),
    },
)
async def follow_live(
    request: Request,
    services: ServicesDep,
    job: Annotated[
        str | None, Query(max_length=64, description="id of a job to follow in full")
    ] = None,
    last_event_id: Annotated[
        str | None, Header(max_length=300, description="id of the last received message")
    ] = None,
) -> StreamingResponse:
    if streams.MEDIA_TYPE not in request.headers.get("accept", ""):
        raise ProblemError(
            406, "not_acceptable", f"this is a stream: send Accept: {streams.MEDIA_TYPE}"
        )
    cursor = Position.parse(last_event_id) if last_event_id else None
    if last_event_id and cursor is None:
        raise ProblemError(
            422,
            "invalid_parameters",
            "Last-Event-ID is not the id of a message",
            faults=[{"path": "header.last-event-id", "message": "must be the id of a message"}],
        )
    batches = await services.live.listen(job, cursor, services.stopping, services.keep_alive_s)
    return streams.response(_encode(batches))


async def _encode(batches: AsyncIterator[Batch]) -> AsyncIterator[bytes]:
    async for batch in batches:
        yield batch.encoded or streams.KEEP_ALIVE
