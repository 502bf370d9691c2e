"""What is told of one job to those who watch it: events, metrics, ranks, the end of its log."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, replace

from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.live.stream_cursor import Message, Position, reset
from holdfast_service.readers.metric_series import everything
from holdfast_service.readers.ranks import ranks_view
from holdfast_service.store import queries, series
from holdfast_service.store.job_lookup import find_job
from holdfast_service.store.models import Job, RankStates
from holdfast_service.views.live import LiveLogs, LiveMetrics

KEPT = 2_000
"""Told last of one job, for those who listen; and as many events are told to who comes back."""
PAGE = 500
CATCH_UP_POINTS = 2_000
"""More points of metrics than that are not told to a listener who comes back; it reads anew."""
JOB_EVERY_S = 1.0
RETRY_S = 1.0
"""A job that could not be read is looked at again after that."""


@dataclass(frozen=True)
class Told:
    """Something of one job as its channel has numbered it; the position's job part after it."""

    number: int
    kind: str
    payload: str
    event: int
    attempt: int
    step: int
    line: int


class Channel:
    """One job, for as long as somebody watches it."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.listeners = 0
        self.number = 0
        self.event, self.attempt, self.step, self.line = 0, 0, 0, 0
        self.ready = False
        """It has begun."""
        self.shown = ""
        """The job as it was told last, as JSON."""
        self.dirty = True
        """It was written since it was read."""
        self._told: deque[Told] = deque(maxlen=KEPT)
        self._ranks_at = 0.0
        self._shown_at = 0.0
        self._failed_at = -RETRY_S
        self._reading = asyncio.Lock()

    def is_due(self, now: float) -> bool:
        return self.ready and self.dirty and now - self._failed_at >= RETRY_S

    def failed(self, now: float) -> None:
        """It could not be read: not again at once."""
        self._failed_at = now

    def beyond(self, number: int) -> list[Told] | None:
        """What was told after that number; None: more than is kept."""
        missing = self.number - number
        if missing > len(self._told):
            return None
        return list(self._told)[-missing:] if missing > 0 else []

    async def begin(self, session: AsyncSession) -> None:
        """From what the job is now; nothing if that has been done."""
        async with self._reading:
            if self.ready:
                return
            job = await find_job(session, self.job_id)
            states = await session.get(RankStates, job.id)
            self.shown = (await queries.job_view(session, job)).model_dump_json()
            self.event, self.line = job.event_seq, job.log_lines
            self.attempt, self.step = job.cursor_attempt, job.cursor_step
            self._ranks_at = states.at if states is not None else 0.0
            self.ready = True  # and dirty: it may have been written meanwhile

    async def read(self, session: AsyncSession) -> None:
        """Tell what is new of the job; if that fails, it is still to be told."""
        self.dirty = False
        try:
            async with self._reading:
                await self._read_new(session)
        except BaseException:
            self.dirty = True
            raise

    async def _read_new(self, session: AsyncSession) -> None:
        job = await find_job(session, self.job_id)
        if job.event_seq > self.event:
            for event in await queries.event_views(session, job.id, self.event, PAGE):
                self.event = event.seq
                self._tell("event", event.model_dump_json())
            self.dirty |= job.event_seq > self.event
        newest = (job.cursor_attempt, job.cursor_step)
        if newest > (self.attempt, self.step):
            rows = await series.rows_beyond(session, job.id, self.attempt, self.step, newest, PAGE)
            if rows:
                self.step, self.attempt = rows[-1][0], rows[-1][1]
                points = tuple(everything(*row) for row in rows)
                self._tell("metrics", LiveMetrics(points=points).model_dump_json())
            self.dirty |= len(rows) == PAGE
        if job.log_lines > self.line:
            self.line = job.log_lines
            self._tell("logs", LiveLogs(last_line=self.line).model_dump_json())
        now = time.monotonic()
        if now - self._shown_at >= JOB_EVERY_S:
            await self._read_slowly(session, job)
            self._shown_at = now
        else:
            self.dirty = True

    async def _read_slowly(self, session: AsyncSession, job: Job) -> None:
        shown = (await queries.job_view(session, job)).model_dump_json()
        if shown != self.shown:
            self.shown = shown
            self._tell("job", shown)
        states = await session.get(RankStates, job.id)
        if states is not None and states.at != self._ranks_at:
            self._tell("ranks", (await ranks_view(session, job)).model_dump_json())
            self._ranks_at = states.at

    def _tell(self, kind: str, payload: str) -> None:
        self.number += 1
        self._told.append(
            Told(self.number, kind, payload, self.event, self.attempt, self.step, self.line)
        )


async def missed(
    session: AsyncSession, job_id: str, since: Position, upto: Position
) -> list[Message]:
    """What a listener missed of its job between two positions."""
    found: list[Message] = []
    at = since
    for event in await queries.event_views(session, job_id, since.event, KEPT):
        if event.seq > upto.event:
            break
        at = replace(at, event=event.seq)
        found.append(Message("event", event.model_dump_json(), at))
    if at.event < upto.event:
        at = replace(at, event=upto.event)
        found.append(reset("too much has happened meanwhile", at))
    newest = (upto.attempt, upto.step)
    told = 0
    while (at.attempt, at.step) < newest:
        if told >= CATCH_UP_POINTS:
            at = replace(at, attempt=upto.attempt, step=upto.step)
            found.append(reset("too much was computed meanwhile", at))
            break
        rows = await series.rows_beyond(session, job_id, at.attempt, at.step, newest, PAGE)
        if not rows:
            break
        at = replace(at, step=rows[-1][0], attempt=rows[-1][1])
        told += len(rows)
        points = tuple(everything(*row) for row in rows)
        found.append(Message("metrics", LiveMetrics(points=points).model_dump_json(), at))
    if at.line < upto.line:
        at = replace(at, line=upto.line)
        found.append(Message("logs", LiveLogs(last_line=upto.line).model_dump_json(), at))
    return found
