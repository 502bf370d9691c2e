"""Server-sent events: numbered, resumable by `Last-Event-ID`, kept alive, ended explicitly.

After a job has ended and everything was sent, a message `end` without a number ends its stream. A
client resumes a stream that closes without `end` (the server shut down, or the connection broke).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request
from starlette.responses import Response, StreamingResponse

from holdfast.rest.problems import ProblemError
from holdfast.rest.services import Services
from holdfast_service.views.pages import EventPage, LogPage

MEDIA_TYPE = "text/event-stream"
KEEP_ALIVE = ": keep-alive\n\n"
END = "event: end\ndata: {}\n\n"
PAGE = 500

Page = TypeVar("Page")


@dataclass(frozen=True)
class StreamRequest:
    """Whether a request asks for a stream, and after which number."""

    stream: bool
    after: int


def requested(request: Request, after: int) -> StreamRequest:
    """Read `Accept` and `Last-Event-ID` (which wins over `after`: a reconnect repeats the URL)."""
    stream = MEDIA_TYPE in request.headers.get("accept", "")
    last = request.headers.get("last-event-id", "")
    if not stream or not last:
        return StreamRequest(stream, after)
    if not (last.isascii() and last.isdigit() and len(last) < 19):
        raise ProblemError(
            422,
            "invalid_parameters",
            "Last-Event-ID is not a number that this server sent",
            faults=[{"path": "header.last-event-id", "message": "must be a whole number"}],
        )
    return StreamRequest(stream, int(last))


async def event_stream(services: Services, job_id: str, after: int) -> Response:
    """All events with a number above `after`, as they arrive."""
    page = await services.jobs.events(job_id, after, PAGE)
    if page.ended and not page.items:
        return Response(status_code=204)  # makes a browser stop reconnecting: no more events follow
    return response(_events(services, job_id, page))


def log_stream(
    services: Services,
    fetch: Callable[[int], Awaitable[LogPage]],
    first: LogPage,
    ended: Callable[[], Awaitable[bool]],
    further_back: Callable[[LogPage], Awaitable[LogPage | None]],
) -> Response:
    """The lines of `first`, then the lines of `fetch(after)`, until the job has ended.

    `further_back` extends a page by earlier lines that are still missing; None: no line is missing.
    """
    return response(_logs(services, fetch, first, ended, further_back))


async def _events(services: Services, job_id: str, page: EventPage) -> AsyncIterator[str]:
    while True:
        for event in page.items:
            yield _message(event.seq, event.kind, event.model_dump_json())
        if page.ended:
            yield END
        if page.ended or services.stopping.is_set():
            return
        following = await _unless_stopping(
            services,
            services.jobs.wait_events(job_id, page.last_seq, PAGE, services.keep_alive_s),
        )
        if following is None:
            return
        page = following
        if not page.items and not page.ended:
            yield KEEP_ALIVE


async def _logs(
    services: Services,
    fetch: Callable[[int], Awaitable[LogPage]],
    page: LogPage,
    ended: Callable[[], Awaitable[bool]],
    further_back: Callable[[LogPage], Awaitable[LogPage | None]],
) -> AsyncIterator[str]:
    while (longer := await further_back(page)) is not None:
        page = longer
        yield KEEP_ALIVE
        if services.stopping.is_set():
            return
    last_sent = time.monotonic()
    over = False
    while True:
        for line in page.items:
            yield _message(line.line, "log", line.model_dump_json())
            last_sent = time.monotonic()
        if over and page.next_cursor is None:
            yield END
            return
        if services.stopping.is_set():
            return
        if page.next_cursor is None:
            if time.monotonic() - last_sent > services.keep_alive_s:
                yield KEEP_ALIVE
                last_sent = time.monotonic()
            # Checked before the next read: lines written until the end are still sent.
            over = await ended()
            await asyncio.sleep(0 if over else services.poll_s)
        page = await fetch(page.last_line)


async def _unless_stopping(services: Services, call: Awaitable[Page]) -> Page | None:
    """The result of `call`, or None as soon as the server shuts down."""
    work = asyncio.ensure_future(call)
    stop = asyncio.ensure_future(services.stopping.wait())
    try:
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()
        stop.cancel()


def _message(number: int, kind: str, payload: str) -> str:
    return f"id: {number}\nevent: {kind}\ndata: {payload}\n\n"


def response(messages: AsyncIterator[str] | AsyncIterator[bytes]) -> StreamingResponse:
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(messages, media_type=MEDIA_TYPE, headers=headers)
