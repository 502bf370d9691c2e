"""The live channel of one job: its events, metrics, rank states and last log line number.

A channel exists while the job has listeners, and keeps its latest messages for them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, replace

from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.errors import JobNotFound
from holdfast_service.live.stream_cursor import Position, StreamMessage, reset
from holdfast_service.readers.metric_series import full_point
from holdfast_service.readers.ranks import ranks_view
from holdfast_service.store import queries, series
from holdfast_service.store.job_lookup import find_job
from holdfast_service.store.models import JobRecord, RankStates
from holdfast_service.views.live import LiveLogs, LiveMetrics

MAX_KEPT = 2_000
"""Messages kept per job; also the maximum number of events sent to a reconnecting listener."""
PAGE_SIZE = 500
MAX_CATCH_UP_POINTS = 2_000
"""Beyond this many metric points, a reconnecting listener gets a reset instead of the points."""
JOB_EVERY_S = 1.0
RETRY_S = 1.0
"""Time after which a job that could not be read is read again."""


@dataclass(frozen=True)
class ChannelMessage:
    """A numbered message of a channel, with the job part of the position after it."""

    number: int
    kind: str
    payload: str
    event: int
    attempt: int
    step: int
    line: int


class Channel:
    """The messages of one job, kept while it has listeners."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.listeners = 0
        self.number = 0
        self.event, self.attempt, self.step, self.line = 0, 0, 0, 0
        self.started = False
        """Whether `start` has completed."""
        self.job_json = ""
        """The job view sent last, as JSON."""
        self.dirty = True
        """Whether the job was written since it was last read."""
        self._messages: deque[ChannelMessage] = deque(maxlen=MAX_KEPT)
        self._ranks_at = 0.0
        self._job_read_at = 0.0
        self._failed_at = -RETRY_S
        self._read_lock = asyncio.Lock()

    def is_due(self, now: float) -> bool:
        return self.started and self.dirty and now - self._failed_at >= RETRY_S

    def record_failure(self, now: float) -> None:
        """Delay the next read, because this one failed."""
        self._failed_at = now

    def messages_after(self, number: int) -> list[ChannelMessage] | None:
        """The messages after `number`; None if some of them are no longer kept."""
        missing = self.number - number
        if missing > len(self._messages):
            return None
        return list(self._messages)[-missing:] if missing > 0 else []

    async def start(self, session: AsyncSession) -> None:
        """Start from the current state of the job; does nothing if already started."""
        async with self._read_lock:
            if self.started:
                return
            job = await find_job(session, self.job_id)
            states = await session.get(RankStates, job.id)
            self.job_json = (await queries.job_view(session, job)).model_dump_json()
            self.event, self.line = job.event_seq, job.log_lines
            self.attempt, self.step = job.cursor_attempt, job.cursor_step
            self._ranks_at = states.at if states is not None else 0.0
            self.started = True  # still dirty: a write may have happened since the read

    async def read(self, session: AsyncSession) -> None:
        """Append messages for all changes of the job; after a failure the channel stays dirty. A
        removed job has no further changes."""
        self.dirty = False
        try:
            async with self._read_lock:
                await self._read_new(session)
        except JobNotFound:
            return
        except BaseException:
            self.dirty = True
            raise

    async def _read_new(self, session: AsyncSession) -> None:
        job = await find_job(session, self.job_id)
        if job.event_seq > self.event:
            for event in await queries.event_views(session, job.id, self.event, PAGE_SIZE):
                self.event = event.seq
                self._append("event", event.model_dump_json())
            self.dirty |= job.event_seq > self.event
        newest = (job.cursor_attempt, job.cursor_step)
        if newest > (self.attempt, self.step):
            rows = await series.rows_beyond(
                session, job.id, self.attempt, self.step, newest, PAGE_SIZE
            )
            if rows:
                self.step, self.attempt = rows[-1][0], rows[-1][1]
                points = tuple(full_point(*row) for row in rows)
                self._append("metrics", LiveMetrics(points=points).model_dump_json())
            self.dirty |= len(rows) == PAGE_SIZE
        if job.log_lines > self.line:
            self.line = job.log_lines
            self._append("logs", LiveLogs(last_line=self.line).model_dump_json())
        now = time.monotonic()
        if now - self._job_read_at >= JOB_EVERY_S:
            await self._read_job_and_ranks(session, job)
            self._job_read_at = now
        else:
            self.dirty = True

    async def _read_job_and_ranks(self, session: AsyncSession, job: JobRecord) -> None:
        job_json = (await queries.job_view(session, job)).model_dump_json()
        if job_json != self.job_json:
            self.job_json = job_json
            self._append("job", job_json)
        states = await session.get(RankStates, job.id)
        if states is not None and states.at != self._ranks_at:
            self._append("ranks", (await ranks_view(session, job)).model_dump_json())
            self._ranks_at = states.at

    def _append(self, kind: str, payload: str) -> None:
        self.number += 1
        self._messages.append(
            ChannelMessage(
                self.number, kind, payload, self.event, self.attempt, self.step, self.line
            )
        )


async def catch_up(
    session: AsyncSession, job_id: str, since: Position, upto: Position
) -> list[StreamMessage]:
    """The messages of a job between two positions."""
    found: list[StreamMessage] = []
    at = since
    for event in await queries.event_views(session, job_id, since.event, MAX_KEPT):
        if event.seq > upto.event:
            break
        at = replace(at, event=event.seq)
        found.append(StreamMessage("event", event.model_dump_json(), at))
    if at.event < upto.event:
        at = replace(at, event=upto.event)
        found.append(reset("too many events since the last message", at))
    newest = (upto.attempt, upto.step)
    points_sent = 0
    while (at.attempt, at.step) < newest:
        if points_sent >= MAX_CATCH_UP_POINTS:
            at = replace(at, attempt=upto.attempt, step=upto.step)
            found.append(reset("too many steps since the last message", at))
            break
        rows = await series.rows_beyond(session, job_id, at.attempt, at.step, newest, PAGE_SIZE)
        if not rows:
            break
        at = replace(at, step=rows[-1][0], attempt=rows[-1][1])
        points_sent += len(rows)
        points = tuple(full_point(*row) for row in rows)
        found.append(StreamMessage("metrics", LiveMetrics(points=points).model_dump_json(), at))
    if at.line < upto.line:
        at = replace(at, line=upto.line)
        found.append(StreamMessage("logs", LiveLogs(last_line=upto.line).model_dump_json(), at))
    return found
