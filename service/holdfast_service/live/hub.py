"""The live hub: one reader of the store for all streams of a server.

The hub polls the store a few times a second while any listener or follower is connected. It finds
changed jobs by their change numbers. It wakes the followers of their events and log lines, as does
a transaction of this process as soon as it is stored.

The hub numbers its messages to listeners. A listener reads the messages after its position from the
hub's memory, so a thousand listeners cost the database no more than a single listener.

A position records what a listener has received. With it, a new connection resumes without gaps or
repeats: events, metrics and log lines come from the store, on any server; rows come from memory on
the same server, and by change number on another server. A row is the complete state of its job in
the list, so a repeated row does no harm.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

import structlog

from holdfast_service.live import job_channel
from holdfast_service.live.changed_jobs import ChangedJobs
from holdfast_service.live.followers import SAFETY_READ_S, FollowedFeed, JobFeed
from holdfast_service.live.job_channel import Channel
from holdfast_service.live.rows import ROWS_PER_S, JobRowFeed
from holdfast_service.live.stream_cursor import NOTHING, Batch, Position, StreamMessage, reset
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import find_job
from holdfast_service.views.live import LiveHello

POLL_S = 0.25
"""Between two reads of the store."""
_READERS = 4
_WAKE_GROUPS = 32
"""Listeners are divided into this many groups, which are woken one after the other."""
_WAKE_INTERVAL_S = 0.0005
"""Minimum time between two wake-ups, per listener."""
_WAKING_SHARE = 0.5
"""Share of that time during which groups are woken; the rest leaves the event loop to requests."""
_WAKE_S = 1.0
"""Listeners wake at least this often, to check for a server stop and to send keep-alives."""

log = structlog.get_logger(__name__)


class LiveHub:
    """Polls the store while listeners or followers are connected. One instance per server."""

    def __init__(
        self, store: Store, *, poll_s: float = POLL_S, rows_per_s: float = ROWS_PER_S
    ) -> None:
        self._store = store
        self._poll_s = poll_s
        self._id = uuid4().hex[:12]
        self._changes = ChangedJobs()
        self._job_rows = JobRowFeed(self._id, rows_per_s, poll_s)
        self._channels: dict[str, Channel] = {}
        self.listeners = 0
        self._followed: dict[tuple[str, JobFeed], FollowedFeed] = {}
        store.on_job_stored.append(self._wake_followers)
        self._poll_task: asyncio.Task[None] | None = None
        self._read_lock = asyncio.Lock()
        self._wake_events = [asyncio.Event() for _ in range(_WAKE_GROUPS)]
        self._next_group = 0
        self._woken_at = 0.0
        self._woken_for_number = 0

    @asynccontextmanager
    async def following(self, job_id: str, feed: JobFeed) -> AsyncIterator[FollowedFeed]:
        """The rounds of a feed of a job, while the block runs."""
        followed = self._followed.setdefault((job_id, feed), FollowedFeed())
        followed.followers += 1
        try:
            await self._start()
            yield followed
        finally:
            followed.followers -= 1
            if not followed.followers:
                del self._followed[job_id, feed]
            self._stop_if_unused()

    async def listen(
        self, job_id: str | None, cursor: Position | None, stop: asyncio.Event, pause_s: float
    ) -> AsyncIterator[Batch]:
        """Batches of messages from `cursor` on, or from now on, until `stop` is set; an empty batch
        after every `pause_s` without messages. Raises JobNotFound before the first batch."""
        if job_id is not None:
            async with self._store.read() as session:
                await find_job(session, job_id)
        return self._listen(job_id, cursor, stop, pause_s)

    async def _listen(
        self, job_id: str | None, cursor: Position | None, stop: asyncio.Event, pause_s: float
    ) -> AsyncIterator[Batch]:
        self.listeners += 1
        self._next_group += 1
        group = self._next_group % len(self._wake_events)
        channel = self._join(job_id)
        try:
            await self._start()
            if channel is not None and not channel.started:
                async with self._store.read() as session:
                    await channel.start(session)
            here = self._here(channel)
            channel_number = channel.number if channel is not None else 0
            missed = await self._catch_up(cursor, here, channel) if cursor is not None else []
            hello = LiveHello(server_time=time.time()).model_dump_json()
            yield Batch([StreamMessage("hello", hello, cursor or here), *missed])
            sent_at = time.monotonic()
            while not stop.is_set():
                wake = self._wake_events[group]
                batch, here, channel_number = self._messages_after(here, channel, channel_number)
                if batch is None and time.monotonic() - sent_at >= pause_s:
                    batch = NOTHING
                if batch is not None:
                    yield batch
                    sent_at = time.monotonic()
                else:
                    await wake.wait()
        finally:
            self._leave(channel)

    def _join(self, job_id: str | None) -> Channel | None:
        if job_id is None:
            return None
        if job_id not in self._channels:
            self._channels[job_id] = Channel(job_id)
            self._store.watched_jobs.start_watching(job_id)
        channel = self._channels[job_id]
        channel.listeners += 1
        return channel

    def _leave(self, channel: Channel | None) -> None:
        self.listeners -= 1
        if channel is not None:
            channel.listeners -= 1
            if not channel.listeners:
                del self._channels[channel.job_id]
                self._store.watched_jobs.stop_watching(channel.job_id)
        self._stop_if_unused()

    async def _start(self) -> None:
        """Start to poll; with the first listener, start the feed of rows."""
        if self._is_polling and (self._job_rows.started or not self.listeners):
            return  # a poll may wait for the database
        async with self._read_lock:
            if not self._is_polling:
                self._job_rows.started = False
                async with self._store.read() as session:
                    await self._changes.start(session)
                self._poll_task = asyncio.create_task(self._poll_forever(), name="live")
            if self.listeners and not self._job_rows.started:
                async with self._store.read() as session:
                    await self._job_rows.start(session, self._changes.settled)

    @property
    def _is_polling(self) -> bool:
        return self._poll_task is not None and not self._poll_task.done()

    def _stop_if_unused(self) -> None:
        if not self.listeners and not self._followed and self._poll_task is not None:
            self._poll_task.cancel()
            self._poll_task = None
            self._job_rows.started = False

    # ---- positions

    def _here(self, channel: Channel | None) -> Position:
        here = Position(self._id, self._job_rows.number, self._job_rows.sent_below())
        return here if channel is None else replace(here, job=channel.job_id, at=channel.at)

    def _messages_after(
        self, here: Position, channel: Channel | None, channel_number: int
    ) -> tuple[Batch | None, Position, int]:
        rows = self._job_rows.messages_after(here)
        here = rows.messages[-1].position if rows else here
        if channel is None:
            return rows, here, 0
        found = list(rows.messages) if rows else []
        messages = channel.messages_after(channel_number)
        if messages is None:
            here = replace(here, at=channel.at)
            found.append(reset("the listener is too slow", here))
        for message in messages or ():
            here = replace(here, at=message.at)
            found.append(StreamMessage(message.kind, message.payload, here))
        return Batch(found) if found else None, here, channel.number

    async def _catch_up(
        self, cursor: Position, here: Position, channel: Channel | None
    ) -> list[StreamMessage]:
        """The messages between `cursor` and `here`. If the connection breaks before the last of
        them, the listener resumes from its old position."""
        same_job = channel is not None and cursor.job == channel.job_id
        at = cursor if same_job else replace(cursor, job=here.job, at=here.at)
        async with self._store.read() as session:
            found = await self._job_rows.catch_up(session, cursor, at, here.row)
            if channel is not None and same_job:
                at = found[-1].position if found else at
                found += await job_channel.catch_up(session, channel.job_id, at, here)
                # The current job: a position does not count `job` messages, so one may be missing.
                found.append(StreamMessage("job", channel.job_json, here))
        if found:
            found[-1] = replace(found[-1], position=here)
        return found

    # ---- polling

    async def _poll_forever(self) -> None:
        period_s, works = self._poll_s, True
        while True:
            began = time.monotonic()
            try:
                await self._poll_once()
                works = True
            except Exception as error:  # all listeners and followers depend on this task
                if works:
                    log.warning("live.poll_failed", exc_info=error)
                works = False
            await self._wake_listeners()
            await asyncio.sleep(max(period_s - (time.monotonic() - began), period_s / 4))

    async def _poll_once(self) -> None:
        async with self._read_lock:
            async with self._store.read() as session:
                changes = await self._changes.poll(session)
            if self._job_rows.started:
                self._job_rows.record(changes)
        for job in changes.written:
            self._wake_followers(job)
        oldest = time.monotonic() - SAFETY_READ_S
        for (job_id, _), followed in self._followed.items():
            if job_id in changes.removed or followed.round.began < oldest:
                followed.end_round()
        for job_id in self._channels.keys() & {job.id for job in changes.written}:
            self._channels[job_id].dirty = True
        self._job_rows.send_pending(self.listeners)
        await self._read_dirty()

    def _wake_followers(self, job: Any) -> None:
        """Wake the followers of a job for what is new in this row."""
        for feed in JobFeed:
            followed = self._followed.get((job.id, feed))
            if followed is not None:
                followed.found(feed.head(job))

    async def _wake_listeners(self) -> None:
        """Wake the listeners if there are new messages, one group after the other, so that requests
        run in between. The interval grows with the number of listeners."""
        now = time.monotonic()
        newest = self._job_rows.number + sum(channel.number for channel in self._channels.values())
        interval_s = min(self.listeners * _WAKE_INTERVAL_S, _WAKE_S)
        if now - self._woken_at < (_WAKE_S if newest == self._woken_for_number else interval_s):
            return
        self._woken_at, self._woken_for_number = now, newest
        for group, wake in enumerate(self._wake_events):
            self._wake_events[group] = asyncio.Event()
            wake.set()
            if self.listeners > len(self._wake_events):
                await asyncio.sleep(_WAKING_SHARE * interval_s / len(self._wake_events))

    async def _read_dirty(self) -> None:
        """Read all changed channels; a failure of one job does not affect other jobs."""
        now = time.monotonic()
        due = [channel for channel in self._channels.values() if channel.is_due(now)]
        for start in range(0, len(due), _READERS):
            batch = due[start : start + _READERS]
            results = await asyncio.gather(*map(self._read, batch), return_exceptions=True)
            for channel, error in zip(batch, results, strict=True):
                if isinstance(error, Exception):
                    channel.record_failure(time.monotonic())
                    log.warning("live.job_unreadable", job=channel.job_id, exc_info=error)

    async def _read(self, channel: Channel) -> None:
        async with self._store.read() as session:
            await channel.read(session)
