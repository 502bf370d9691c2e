"""Server-sent events: numbered, resumable by `Last-Event-ID`, kept alive, ended explicitly.

After a job has ended and everything was sent, a message `end` without a number ends its stream. A
client resumes a stream that closes without `end`: the server shut down, the connection broke, or
the job was removed, which the next answer says (404).

A stream reads the store when its feed has changed, and shares the read with other streams at the
same position. It reads the next part once the client has taken the last one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import StreamingResponse

from holdfast.rest.http.problems import ProblemError
from holdfast.rest.services import Services
from holdfast_service.errors import JobNotFound
from holdfast_service.live.followers import JobFeed
from holdfast_service.views.pages import EventPage, LogPage

MEDIA_TYPE = "text/event-stream"
KEEP_ALIVE = b": keep-alive\n\n"
END = b"event: end\ndata: {}\n\n"
PAGE = 500
"""Most items that are read at a time; a stream holds no more for a client that reads slowly."""
PIECE = 2**16
"""Most bytes that are sent at a time: the server waits for a slow client between two pieces."""


@dataclass(frozen=True)
class StreamRequest:
    """Whether a request asks for a stream, and after which number."""

    stream: bool
    after: int


@dataclass(frozen=True)
class StreamPart:
    """Messages of a stream, encoded. `last`: the number after which the next part begins; `more`:
    it can be read at once; `over`: the job has ended, and no part follows."""

    encoded: bytes
    last: int
    more: bool
    over: bool


ReadPart = Callable[[int], Coroutine[Any, Any, StreamPart]]
"""Reads the part after a number. Raises JobNotFound."""


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


def event_part(page: EventPage) -> StreamPart:
    text = "".join(_message(event.seq, event.kind, event.model_dump_json()) for event in page.items)
    return StreamPart(text.encode(), page.last_seq, page.next_cursor is not None, page.ended)


def log_part(page: LogPage) -> StreamPart:
    text = "".join(_message(line.line, "log", line.model_dump_json()) for line in page.items)
    return StreamPart(text.encode(), page.last_line, page.next_cursor is not None, page.ended)


async def follow(
    services: Services, job_id: str, feed: JobFeed, first: StreamPart, read: ReadPart, key: str = ""
) -> AsyncGenerator[bytes, None]:
    """`first` and all parts after it, until the job has ended or was removed, or the server stops.
    `key`: streams of the feed with the same key read the same parts."""
    stop = asyncio.ensure_future(services.stopping.wait())
    try:
        async with services.live.following(job_id, feed) as followed:
            current = followed.round
            part = replace(first, more=True)  # read before this round
            sent_at = time.monotonic()
            while True:
                for start in range(0, len(part.encoded), PIECE):
                    yield part.encoded[start : start + PIECE]
                    sent_at = time.monotonic()
                if part.over:
                    yield END
                if part.over or stop.done():
                    return
                if not part.more:
                    left_s = sent_at + services.keep_alive_s - time.monotonic()
                    changed: set[asyncio.Future[Any]] = {current.ended, stop}
                    await asyncio.wait(changed, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if time.monotonic() - sent_at >= services.keep_alive_s:
                    yield KEEP_ALIVE
                    sent_at = time.monotonic()
                if part.more or current.ended.done():
                    current = followed.round
                    part = await current.read((key, part.last), partial(read, part.last))
                else:
                    part = replace(part, encoded=b"")
    except JobNotFound:
        return
    finally:
        stop.cancel()


def _message(number: int, kind: str, payload: str) -> str:
    return f"id: {number}\nevent: {kind}\ndata: {payload}\n\n"


def response(messages: AsyncIterator[bytes]) -> StreamingResponse:
    headers = {"Cache-Control": "no-store", "Vary": "Accept", "X-Accel-Buffering": "no"}
    return StreamingResponse(messages, media_type=MEDIA_TYPE, headers=headers)
