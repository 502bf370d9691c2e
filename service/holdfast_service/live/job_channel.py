"""The live channel of one job: its events, metrics, rank states and last log line number.

A channel exists while the job has listeners, and keeps its latest messages for them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.errors import JobNotFound
from holdfast_service.live.stream_cursor import JobPosition, Position, StreamMessage, reset
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
    """A message of a channel, with the position in the job after it."""

    kind: str
    payload: str
    at: JobPosition


class Channel:
    """The messages of one job, kept while it has listeners."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.listeners = 0
        self.number = 0
        """Number of the message sent last."""
        self.at = JobPosition()
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
            self.at = JobPosition(job.event_seq, job.cursor_attempt, job.cursor_step, job.log_lines)
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
        if job.event_seq > self.at.event:
            for event in await queries.event_views(session, job.id, self.at.event, PAGE_SIZE):
                self._append("event", event.model_dump_json(), event=event.seq)
            self.dirty |= job.event_seq > self.at.event
        newest = (job.cursor_attempt, job.cursor_step)
        if newest > (self.at.attempt, self.at.step):
            rows = await series.rows_beyond(
                session, job.id, self.at.attempt, self.at.step, newest, PAGE_SIZE
            )
            if rows:
                step, attempt = rows[-1][:2]
                self._append("metrics", _points(rows), attempt=attempt, step=step)
            self.dirty |= len(rows) == PAGE_SIZE
        if job.log_lines > self.at.line:
            self._append("logs", _last_line(job.log_lines), line=job.log_lines)
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

    def _append(self, kind: str, payload: str, **numbers: int) -> None:
        self.number += 1
        self.at = replace(self.at, **numbers)
        self._messages.append(ChannelMessage(kind, payload, self.at))


async def catch_up(
    session: AsyncSession, job_id: str, since: Position, upto: Position
) -> list[StreamMessage]:
    """The messages of a job between two positions."""
    found: list[StreamMessage] = []
    here = since
    for event in await queries.event_views(session, job_id, since.at.event, MAX_KEPT):
        if event.seq > upto.at.event:
            break
        here = here.moved(event=event.seq)
        found.append(StreamMessage("event", event.model_dump_json(), here))
    if here.at.event < upto.at.event:
        here = here.moved(event=upto.at.event)
        found.append(reset("too many events since the last message", here))
    newest = (upto.at.attempt, upto.at.step)
    points_sent = 0
    while (last := (here.at.attempt, here.at.step)) < newest:
        if points_sent >= MAX_CATCH_UP_POINTS:
            here = here.moved(attempt=upto.at.attempt, step=upto.at.step)
            found.append(reset("too many steps since the last message", here))
            break
        rows = await series.rows_beyond(session, job_id, *last, newest, PAGE_SIZE)
        if not rows:
            break
        here = here.moved(step=rows[-1][0], attempt=rows[-1][1])
        points_sent += len(rows)
        found.append(StreamMessage("metrics", _points(rows), here))
    if here.at.line < upto.at.line:
        here = here.moved(line=upto.at.line)
        found.append(StreamMessage("logs", _last_line(upto.at.line), here))
    return found


def _points(rows: Sequence[Any]) -> str:
    return LiveMetrics(points=tuple(full_point(*row) for row in rows)).model_dump_json()


def _last_line(number: int) -> str:
    return LiveLogs(last_line=number).model_dump_json()
