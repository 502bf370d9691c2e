"""What changes, for everybody who watches: one reader of the store for all streams of a server.

The hub looks at the store a few times a second while somebody listens. It finds the jobs that were
written since by their change numbers, and numbers what it has to say of them; a listener takes from
the hub's memory what lies beyond its own position, so a thousand listeners cost no more of the
database than one.

A position is what a listener has got so far. With it another connection goes on without a gap or a
repeat: of events, metrics and log lines from the store, wherever it connects; of rows on the same
server from its memory, elsewhere by change numbers. A row is the whole state of its line, so that
one told again there says nothing wrong.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from uuid import uuid4

import structlog

from holdfast_service.live import one_job
from holdfast_service.live.one_job import Channel
from holdfast_service.live.rows import Rows
from holdfast_service.live.stream_cursor import NOTHING, Batch, Message, Position, reset
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import find_job
from holdfast_service.views.live import LiveHello

_READERS = 4
_WAKE_ROWS = 32
"""Listeners are woken in so many rows, one after the other."""
_WAKES_APART_S = 0.0005
"""Between two messages of whatever kind, for each who listens."""
_WAKING_SHARE = 0.5
"""Of that time, in which the rows are woken: requests that come meanwhile find a loop with room."""
_WAKE_S = 1.0
"""Listeners look at the clock so often: whether the server stops, whether to keep alive."""

log = structlog.get_logger(__name__)


class LiveHub:
    """Looks at the store while somebody listens. One per server."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._id = uuid4().hex[:12]
        self._rows = Rows(self._id, store.postgres, settings)
        self._channels: dict[str, Channel] = {}
        self._listeners = 0
        self._looking: asyncio.Task[None] | None = None
        self._beginning = asyncio.Lock()
        self._news = [asyncio.Event() for _ in range(_WAKE_ROWS)]
        self._seat = 0
        self._woken_at = 0.0
        self._woken_for = 0

    @property
    def listeners(self) -> int:
        return self._listeners

    async def listen(
        self, job_id: str | None, cursor: Position | None, stop: asyncio.Event, pause_s: float
    ) -> AsyncIterator[Batch]:
        """Everything from `cursor` on, or from now on, until `stop` is set; an empty batch after
        every `pause_s` without news. Raises JobNotFound before the first one."""
        if job_id is not None:
            async with self._store.read() as session:
                await find_job(session, job_id)
        return self._listen(job_id, cursor, stop, pause_s)

    async def _listen(
        self, job_id: str | None, cursor: Position | None, stop: asyncio.Event, pause_s: float
    ) -> AsyncIterator[Batch]:
        self._listeners += 1
        self._seat += 1
        seat = self._seat % len(self._news)
        channel = self._joined(job_id)
        try:
            await self._begin(channel)
            here = self._here(channel)
            seen_of_job = channel.number if channel is not None else 0
            missed = await self._missed(cursor, here, channel) if cursor is not None else []
            hello = LiveHello(server_time=time.time()).model_dump_json()
            yield Batch([Message("hello", hello, cursor or here), *missed])
            told_at = time.monotonic()
            while not stop.is_set():
                news = self._news[seat]
                batch, here, seen_of_job = self._beyond(here, channel, seen_of_job)
                if batch is None and time.monotonic() - told_at >= pause_s:
                    batch = NOTHING
                if batch is not None:
                    yield batch
                    told_at = time.monotonic()
                else:
                    await news.wait()
        finally:
            self._leave(channel)

    def _joined(self, job_id: str | None) -> Channel | None:
        if job_id is None:
            return None
        if job_id not in self._channels:
            self._channels[job_id] = Channel(job_id)
            self._store.serving.begin_to_watch(job_id)
        channel = self._channels[job_id]
        channel.listeners += 1
        return channel

    def _leave(self, channel: Channel | None) -> None:
        self._listeners -= 1
        if channel is not None:
            channel.listeners -= 1
            if not channel.listeners:
                del self._channels[channel.job_id]
                self._store.serving.end_to_watch(channel.job_id)
        if not self._listeners and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _begin(self, channel: Channel | None) -> None:
        async with self._beginning:
            if self._looking is None or self._looking.done():
                async with self._store.read() as session:
                    await self._rows.begin(session)
                self._looking = asyncio.create_task(self._look(), name="live")
        if channel is not None and not channel.ready:
            async with self._store.read() as session:
                await channel.begin(session)

    # ---- positions

    def _here(self, channel: Channel | None) -> Position:
        here = Position(self._id, self._rows.number, self._rows.told_upto())
        return here if channel is None else replace(here, job=channel.job_id).moved(channel)

    def _beyond(
        self, here: Position, channel: Channel | None, seen_of_job: int
    ) -> tuple[Batch | None, Position, int]:
        rows = self._rows.beyond(here)
        here = rows.messages[-1].position if rows else here
        if channel is None:
            return rows, here, 0
        found = list(rows.messages) if rows else []
        news = channel.beyond(seen_of_job)
        if news is None:
            here = here.moved(channel)
            found.append(reset("the listener is too slow", here))
        for told in news or ():
            here = here.moved(told)
            found.append(Message(told.kind, told.payload, here))
        return Batch(found) if found else None, here, channel.number

    async def _missed(
        self, cursor: Position, here: Position, channel: Channel | None
    ) -> list[Message]:
        """What was told between the listener's position and this one. Until all of it is there, a
        break lets the listener begin again where it was."""
        same_job = channel is not None and cursor.job == channel.job_id
        at = cursor if same_job else replace(cursor, job=here.job).moved(here)
        async with self._store.read() as session:
            found = await self._rows.missed(session, cursor, at, here.row)
            if channel is not None and same_job:
                at = found[-1].position if found else at
                found += await one_job.missed(session, channel.job_id, at, here)
                # As it is now: what a position does not count may have been cut off.
                found.append(Message("job", channel.shown, here))
        if found:
            found[-1] = replace(found[-1], position=here)
        return found

    # ---- looking

    async def _look(self) -> None:
        period_s = self._settings.live_poll_s
        while True:
            began = time.monotonic()
            try:
                await self._look_once()
            except Exception as error:  # whatever it is, everybody listens to this one task
                log.warning("live.look_failed", exc_info=error)
            await self._wake_in_time()
            await asyncio.sleep(max(period_s - (time.monotonic() - began), period_s / 4))

    async def _look_once(self) -> None:
        async with self._store.read() as session:
            written = await self._rows.look(session)
        for job_id in self._channels.keys() & set(written):
            self._channels[job_id].dirty = True
        self._rows.tell_pending(self._listeners)
        await self._read_dirty()

    async def _wake_in_time(self) -> None:
        """Everybody, if there is news, some after the others: between them, requests have their
        turn. So many as listen cannot be told of everything at once."""
        now = time.monotonic()
        told = self._rows.number + sum(one.number for one in self._channels.values())
        apart_s = min(self._listeners * _WAKES_APART_S, _WAKE_S)
        if now - self._woken_at < (_WAKE_S if told == self._woken_for else apart_s):
            return
        self._woken_at, self._woken_for = now, told
        for row, news in enumerate(self._news):
            self._news[row] = asyncio.Event()
            news.set()
            if self._listeners > len(self._news):
                await asyncio.sleep(_WAKING_SHARE * apart_s / len(self._news))

    async def _read_dirty(self) -> None:
        """What one job's reading ends in keeps no other job from being read."""
        now = time.monotonic()
        due = [one for one in self._channels.values() if one.is_due(now)]
        for start in range(0, len(due), _READERS):
            some = due[start : start + _READERS]
            ends = await asyncio.gather(*map(self._read, some), return_exceptions=True)
            for channel, error in zip(some, ends, strict=True):
                if isinstance(error, Exception):
                    channel.failed(time.monotonic())
                    log.warning("live.job_unreadable", job=channel.job_id, exc_info=error)

    async def _read(self, channel: Channel) -> None:
        async with self._store.read() as session:
            await channel.read(session)
