"""What changes, for everybody who watches: one reader of the store for all streams of a server.

The hub looks at the store a few times a second while somebody listens. It finds the jobs that were
written since by their change numbers, and numbers what it has to say of them; a listener takes from
the hub's memory what lies beyond its own position, so a thousand listeners cost no more of the
database than one. A job that merely advanced is told of at a bounded rate (`live_rows_per_s`), the
newest state of each in turn; a change of state is told at once.

A position is what a listener has got so far. With it another connection goes on without a gap or a
repeat: of events, metrics and log lines from the store, wherever it connects; of rows on the same
server from its memory, elsewhere by change numbers. A row is the whole state of its line, so that
one told again there says nothing wrong.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from uuid import uuid4

import structlog
from sqlalchemy import func, literal_column, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_lookup import find_job
from holdfast_service.lifecycle import State
from holdfast_service.list_views import JobRow
from holdfast_service.live_views import LiveHello, LiveLogs, LiveMetrics, LiveReset
from holdfast_service.metrics import everything
from holdfast_service.rank_reading import ranks_view
from holdfast_service.settings import Settings
from holdfast_service.store import listing, queries, series
from holdfast_service.store.change_numbers import NOT_YET_READ
from holdfast_service.store.engine import Store
from holdfast_service.store.models import Job, RankStates

KEPT_ROWS = 20_000
"""Told last, for those who come back; about 10 MB."""
KEPT_OF_JOB = 2_000
PAGE = 500
CATCH_UP_ROWS = 2_000
"""More than so many jobs that changed meanwhile are not told one by one."""
CATCH_UP_POINTS = 2_000
"""More points of metrics than that are not told to a listener who comes back; it reads anew."""
KEPT_ENDED = 20_000
"""Jobs that have ended are remembered, so as not to be told again for nothing."""
JOB_EVERY_S = 1.0
MOST_AT_ONCE = 5_000
"""Rows that one look reads; the next one goes on."""
_READERS = 4
_WAKE_ROWS = 32
"""Listeners are woken in so many rows, one after the other."""
_APART_S = 0.001
_MOST_APART_S = 1.5
"""Between two messages of progress alone, for each who listens: what it costs grows with them."""
_WAKES_APART_S = 0.0005
"""The same between two messages of whatever kind."""
_WAKE_S = 1.0
"""Listeners look at the clock so often: whether the server stops, whether to keep alive."""
_RETRY_S = 1.0
"""A job that could not be read is looked at again after that."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Position:
    """How far a listener has come: of rows on the hub `hub`, and of the job it watches."""

    hub: str
    row: int
    """Number of the last row on that hub."""
    changed: int
    """Change number up to which rows were looked for."""
    job: str = "-"
    event: int = 0
    attempt: int = 0
    step: int = 0
    line: int = 0

    def cursor(self) -> str:
        return (
            f"{self.hub}.{self.row}.{self.changed}.{self.job}"
            f".{self.event}.{self.attempt}.{self.step}.{self.line}"
        )

    @classmethod
    def of(cls, cursor: str) -> Position | None:
        """None for what is no cursor of such a stream."""
        parts = cursor.split(".")
        if len(parts) != 8 or len(cursor) > 300 or not cursor.isascii():
            return None
        hub, row, changed, job, *numbers = parts
        told = [row, changed, *numbers]
        if not all(one.isdigit() and len(one) < 19 for one in told):
            return None
        event, attempt, step, line = map(int, numbers)
        return cls(hub, int(row), int(changed), job, event, attempt, step, line)


@dataclass(frozen=True)
class Message:
    """`kind` and JSON, and the position of whoever has got it."""

    kind: str
    payload: str
    position: Position


@dataclass(frozen=True)
class _Told:
    """A row as the hub has numbered it."""

    number: int
    changed: int
    payload: str


@dataclass(frozen=True)
class _Page:
    """Where a look that found more than it may read at once goes on: after this job. `upto`: what
    `_upto` said at the beginning, since which other changes may have become visible."""

    changed: int
    job_id: str
    upto: int | None


@dataclass(frozen=True)
class _OfJob:
    """Something of one job as its channel has numbered it; the position's job part after it."""

    number: int
    kind: str
    payload: str
    event: int
    attempt: int
    step: int
    line: int


class _Channel:
    """What is told of one job to those who watch it."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.listeners = 0
        self.told: deque[_OfJob] = deque(maxlen=KEPT_OF_JOB)
        self.number = 0
        self.ready = False
        self.dirty = True
        self.event, self.attempt, self.step, self.line = 0, 0, 0, 0
        self.ranks_at = 0.0
        self.shown = ""
        self.shown_at = 0.0
        self.failed_at = -_RETRY_S
        self.reading = asyncio.Lock()

    def tell(self, kind: str, payload: str) -> None:
        self.number += 1
        self.told.append(
            _OfJob(self.number, kind, payload, self.event, self.attempt, self.step, self.line)
        )

    def after(self, number: int) -> list[_OfJob]:
        missing = self.number - number
        if missing <= 0:
            return []
        return list(self.told)[-missing:]


class Batch:
    """Messages that belong together; what is made of them for the wire is made once, however many
    listeners get them."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = tuple(messages)

    @cached_property
    def encoded(self) -> bytes:
        """As server-sent events."""
        return "".join(
            f"id: {one.position.cursor()}\nevent: {one.kind}\ndata: {one.payload}\n\n"
            for one in self.messages
        ).encode()


class LiveHub:
    """Looks at the store while somebody listens. One per server."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._id = uuid4().hex[:12]
        self._rows: deque[_Told] = deque(maxlen=KEPT_ROWS)
        self._number = 0
        self._changed = 0
        self._page: _Page | None = None
        self._known: dict[str, _Known] = {}
        self._ended: dict[str, None] = {}  # of the known ones, the last to be told at the end
        self._pending: dict[str, tuple[JobRow, int]] = {}  # and the change since which it is
        self._shared: tuple[int, Batch | None] = (0, None)  # beyond which row, all there is
        self._channels: dict[str, _Channel] = {}
        self._listeners = 0
        self._looking: asyncio.Task[None] | None = None
        self._beginning = asyncio.Lock()
        self._news = [asyncio.Event() for _ in range(_WAKE_ROWS)]
        self._seat = 0
        self._told_at = 0.0
        self._woken_at = 0.0
        self._woken_for = 0
        self._allowance = 0.0

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
                    batch = _NOTHING
                if batch is not None:
                    yield batch
                    told_at = time.monotonic()
                else:
                    await news.wait()
        finally:
            self._leave(channel)

    def _joined(self, job_id: str | None) -> _Channel | None:
        if job_id is None:
            return None
        channel = self._channels.setdefault(job_id, _Channel(job_id))
        channel.listeners += 1
        return channel

    def _leave(self, channel: _Channel | None) -> None:
        self._listeners -= 1
        if channel is not None:
            channel.listeners -= 1
            if not channel.listeners and self._channels.get(channel.job_id) is channel:
                del self._channels[channel.job_id]
        if not self._listeners and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _begin(self, channel: _Channel | None) -> None:
        async with self._beginning:
            if self._looking is None or self._looking.done():
                # Nobody listened for a while: what was told before is beyond what is remembered.
                self._rows.clear()
                self._pending.clear()
                self._page = None
                async with self._store.read() as session:
                    self._changed = await self._newest_change(session)
                    self._known, self._ended = await _gists(session), {}
                self._number += 1  # so that a position of before is not taken for one of now
                self._looking = asyncio.create_task(self._look(), name="live")
        if channel is not None:
            async with channel.reading:
                if not channel.ready:
                    await self._begin_channel(channel)

    # ---- positions

    def _here(self, channel: _Channel | None) -> Position:
        here = Position(self._id, self._number, self._told_upto())
        return here if channel is None else _moved(replace(here, job=channel.job_id), channel)

    def _told_upto(self) -> int:
        """No change up to this one waits for its turn to be told. (Those that wait stand in the
        order of the numbers since which they do.)"""
        oldest = next(iter(self._pending.values()), None)
        return self._changed if oldest is None else min(self._changed, oldest[1] - 1)

    def _beyond(
        self, here: Position, channel: _Channel | None, seen_of_job: int
    ) -> tuple[Batch | None, Position, int]:
        if channel is None:
            batch = self._rows_beyond(here)
            return batch, batch.messages[-1].position if batch else here, 0
        rows = self._rows_beyond(here)
        found = list(rows.messages) if rows else []
        here = found[-1].position if found else here
        if channel.number - seen_of_job > len(channel.told):
            here = _moved(here, channel)
            found.append(Message("reset", _reset("the listener is too slow"), here))
        else:
            for told in channel.after(seen_of_job):
                here = _moved(here, told)
                found.append(Message(told.kind, told.payload, here))
        return Batch(found) if found else None, here, channel.number

    def _rows_beyond(self, here: Position) -> Batch | None:
        missing = self._number - here.row
        if missing <= 0:
            return None
        plain = here.job == "-"
        if plain and self._shared[0] == here.row and self._shared[1] is not None:
            return self._shared[1]
        if missing > len(self._rows):
            here = replace(here, row=self._number, changed=self._told_upto())
            return Batch([Message("reset", _reset("the listener is too slow"), here)])
        found = [
            Message("row", told.payload, replace(here, row=told.number, changed=told.changed))
            for told in _last(self._rows, missing)
        ]
        batch = Batch(found)
        if plain:
            self._shared = (here.row, batch)
        return batch

    async def _missed(
        self, cursor: Position, here: Position, channel: _Channel | None
    ) -> list[Message]:
        """What was told between the listener's position and this one. Until all of it is there, a
        break lets the listener begin again where it was."""
        same_job = channel is not None and cursor.job == channel.job_id
        at = cursor if same_job else _of_job(cursor, here)
        found: list[Message] = []
        count = here.row - cursor.row
        if cursor.hub == self._id and 0 <= count <= len(self._rows):
            kept = [one for one in self._rows if cursor.row < one.number <= here.row]
            for told in kept:
                at = replace(at, row=told.number, changed=told.changed)
                found.append(Message("row", told.payload, at))
        else:
            async with self._store.read() as session:
                newest = await self._newest_change(session)
                written = await self._written_since(session, cursor.changed, CATCH_UP_ROWS + 1)
            if cursor.changed > newest:
                found.append(Message("reset", _reset("the store is another one"), at))
            elif len(written) > CATCH_UP_ROWS:
                found.append(Message("reset", _reset("too much has changed meanwhile"), at))
            else:
                rows = [row for row in map(_readable, written) if row is not None]
                found += [Message("row", row.model_dump_json(), at) for row in rows]
        if channel is not None and same_job:
            async with self._store.read() as session:
                found += await _missed_of_job(session, channel.job_id, at, here)
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
            upto = await self._upto(session)
            page = self._page or _Page(self._changed, "", upto)
            written = await self._written_since(session, self._changed, MOST_AT_ONCE, page)
        for one in written:
            row = _readable(one)
            if row is not None:
                # PostgreSQL: a lower number may yet be read, but none below where this look began.
                self._note(row, self._changed if self._store.postgres else one.changed)
        self._tell_pending()
        if written:
            page = replace(page, changed=written[-1].changed, job_id=written[-1].id)
        if len(written) == MOST_AT_ONCE:
            self._page = page
        else:
            self._page = None
            self._changed = max(self._changed, page.changed if page.upto is None else page.upto)
        await self._read_dirty()

    async def _wake_in_time(self) -> None:
        """Everybody, if there is news, some after the others: between them, requests have their
        turn. So many as listen cannot be told of everything at once."""
        now = time.monotonic()
        told = self._number + sum(one.number for one in self._channels.values())
        apart_s = _WAKE_S if told == self._woken_for else self._listeners * _WAKES_APART_S
        if now - self._woken_at < min(apart_s, _WAKE_S):
            return
        self._woken_at, self._woken_for = now, told
        for row, news in enumerate(self._news):
            self._news[row] = asyncio.Event()
            news.set()
            if self._listeners > len(self._news):
                await asyncio.sleep(0)

    async def _read_dirty(self) -> None:
        """What one job's reading ends in keeps no other job from being read."""
        late = time.monotonic() - _RETRY_S
        dirty = [
            one
            for one in self._channels.values()
            if one.ready and one.dirty and one.failed_at <= late
        ]
        for start in range(0, len(dirty), _READERS):
            some = dirty[start : start + _READERS]
            ends = await asyncio.gather(*map(self._read, some), return_exceptions=True)
            for channel, error in zip(some, ends, strict=True):
                if isinstance(error, Exception):
                    channel.failed_at = time.monotonic()
                    log.warning("live.job_unreadable", job=channel.job_id, exc_info=error)

    def _note(self, row: JobRow, changed: int) -> None:
        """A job that was written at `changed` or later: told now if its state is another, or in
        its turn."""
        channel = self._channels.get(row.id)
        if channel is not None:
            channel.dirty = True
        gist = _gist(row)
        known = self._known.get(row.id)
        if known is not None and known.row == row:
            return
        self._remember(_Known(gist, row), row)
        if known is None or known.gist != gist:
            self._pending.pop(row.id, None)
            self._tell(row)
        else:
            since = self._pending[row.id][1] if row.id in self._pending else changed
            self._pending[row.id] = (row, since)

    def _remember(self, known: _Known, row: JobRow) -> None:
        self._known[row.id] = known
        if row.state.terminal:
            self._ended.pop(row.id, None)
            self._ended[row.id] = None
        if len(self._ended) > KEPT_ENDED:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self._known.pop(oldest, None)

    def _tell(self, row: JobRow) -> None:
        self._number += 1
        self._rows.append(_Told(self._number, self._told_upto(), row.model_dump_json()))

    def _tell_pending(self) -> None:
        rate = self._settings.live_rows_per_s
        self._allowance = min(2 * rate, self._allowance + rate * self._settings.live_poll_s)
        now = time.monotonic()
        if now - self._told_at < min(_MOST_APART_S, self._listeners * _APART_S):
            return
        self._told_at = now
        while self._pending and self._allowance >= 1:
            job_id, (row, _) = next(iter(self._pending.items()))
            del self._pending[job_id]
            self._tell(row)
            self._allowance -= 1

    async def _upto(self, session: AsyncSession) -> int | None:
        """PostgreSQL: changes below this number are all visible in this snapshot."""
        if not self._store.postgres:
            return None
        return int((await session.execute(select(literal_column(NOT_YET_READ)))).scalar_one())

    async def _newest_change(self, session: AsyncSession) -> int:
        upto = await self._upto(session)
        if upto is not None:
            return upto
        return await session.scalar(select(func.max(Job.changed))) or 0

    async def _written_since(
        self, session: AsyncSession, changed: int, limit: int, page: _Page | None = None
    ) -> Sequence[Any]:
        """The columns of the rows of jobs, by their change numbers."""
        later = Job.changed >= changed if self._store.postgres else Job.changed > changed
        jobs = select(*listing.SHOWN).where(later)
        if page is not None and page.job_id:
            jobs = jobs.where(
                Job.changed >= page.changed, or_(Job.changed > page.changed, Job.id > page.job_id)
            )
        return (await session.execute(jobs.order_by(Job.changed, Job.id).limit(limit))).all()

    # ---- one job

    async def _begin_channel(self, channel: _Channel) -> None:
        async with self._store.read() as session:
            job = await find_job(session, channel.job_id)
            states = await session.get(RankStates, job.id)
            shown = (await queries.job_view(session, job)).model_dump_json()
        channel.event, channel.line = job.event_seq, job.log_lines
        channel.attempt, channel.step = job.cursor_attempt, job.cursor_step
        channel.ranks_at = states.at if states is not None else 0.0
        channel.shown, channel.ready = shown, True  # and dirty: it may have been written meanwhile

    async def _read(self, channel: _Channel) -> None:
        """Tell what is new of a job; if that fails, it is still to be told."""
        channel.dirty = False
        try:
            await self._read_new(channel)
        except BaseException:
            channel.dirty = True
            raise

    async def _read_new(self, channel: _Channel) -> None:
        async with channel.reading, self._store.read() as session:
            job = await find_job(session, channel.job_id)
            if job.event_seq > channel.event:
                for event in await queries.event_views(session, job.id, channel.event, PAGE):
                    channel.event = event.seq
                    channel.tell("event", event.model_dump_json())
                channel.dirty |= job.event_seq > channel.event
            newest = (job.cursor_attempt, job.cursor_step)
            if newest > (channel.attempt, channel.step):
                rows = await series.rows_beyond(
                    session, job.id, channel.attempt, channel.step, newest, PAGE
                )
                if rows:
                    channel.step, channel.attempt = rows[-1][0], rows[-1][1]
                    points = tuple(everything(*row) for row in rows)
                    channel.tell("metrics", LiveMetrics(points=points).model_dump_json())
                channel.dirty |= len(rows) == PAGE
            if job.log_lines > channel.line:
                channel.line = job.log_lines
                channel.tell("logs", LiveLogs(last_line=channel.line).model_dump_json())
            now = time.monotonic()
            if now - channel.shown_at >= JOB_EVERY_S:
                await self._read_slowly(session, channel, job)
                channel.shown_at = now
            else:
                channel.dirty = True

    async def _read_slowly(self, session: AsyncSession, channel: _Channel, job: Job) -> None:
        shown = (await queries.job_view(session, job)).model_dump_json()
        if shown != channel.shown:
            channel.shown = shown
            channel.tell("job", shown)
        states = await session.get(RankStates, job.id)
        if states is not None and states.at != channel.ranks_at:
            channel.tell("ranks", (await ranks_view(session, job)).model_dump_json())
            channel.ranks_at = states.at


async def _missed_of_job(
    session: AsyncSession, job_id: str, since: Position, upto: Position
) -> list[Message]:
    """What a listener missed of its job between two positions."""
    found: list[Message] = []
    at = since
    for event in await queries.event_views(session, job_id, since.event, KEPT_OF_JOB):
        if event.seq > upto.event:
            break
        at = replace(at, event=event.seq)
        found.append(Message("event", event.model_dump_json(), at))
    if at.event < upto.event:
        at = replace(at, event=upto.event)
        found.append(Message("reset", _reset("too much has happened meanwhile"), at))
    newest = (upto.attempt, upto.step)
    told = 0
    while (at.attempt, at.step) < newest:
        if told >= CATCH_UP_POINTS:
            at = replace(at, attempt=upto.attempt, step=upto.step)
            found.append(Message("reset", _reset("too much was computed meanwhile"), at))
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


@dataclass(frozen=True)
class _Known:
    """What is known of a job: what of it is told at once, and its row, if it was read."""

    gist: tuple[object, ...]
    row: JobRow | None = None


async def _gists(session: AsyncSession) -> dict[str, _Known]:
    """Of the jobs that have not ended."""
    live = [state.value for state in State if not state.terminal]
    found = await session.execute(
        select(
            Job.id,
            Job.state,
            Job.desired,
            Job.attempt,
            Job.incidents,
            Job.waiting,
            Job.outcome_code,
            Job.ended_at,
            Job.name,
        ).where(Job.state.in_(live))
    )
    return {
        one.id: _Known(
            (
                one.state,
                one.desired,
                one.attempt,
                one.incidents,
                one.waiting["resource"] if one.waiting else None,
                one.outcome_code,
                one.ended_at,
                one.name,
            )
        )
        for one in found
    }


def _readable(written: Any) -> JobRow | None:
    """None: what is stored of this job cannot be shown, which is no other job's trouble."""
    try:
        return listing.row(written)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        log.warning("live.row_unreadable", job=written.id, exc_info=error)
        return None


def _gist(row: JobRow) -> tuple[object, ...]:
    """What of a row is told at once when it changes; the rest is progress."""
    waits = row.waiting.resource if row.waiting else None
    return (
        row.state,
        row.desired,
        row.attempt,
        row.incidents,
        waits,
        row.outcome_code,
        row.ended_at,
        row.name,
    )


def _moved(here: Position, to: _OfJob | _Channel) -> Position:
    return replace(here, event=to.event, attempt=to.attempt, step=to.step, line=to.line)


def _of_job(cursor: Position, here: Position) -> Position:
    """The rows' part of one position, and the job's part of another."""
    return replace(
        cursor,
        job=here.job,
        event=here.event,
        attempt=here.attempt,
        step=here.step,
        line=here.line,
    )


def _last(kept: deque[_Told], count: int) -> list[_Told]:
    return [kept[index] for index in range(len(kept) - count, len(kept))] if count > 0 else []


def _reset(reason: str) -> str:
    return LiveReset(reason=reason).model_dump_json()


_NOTHING = Batch(())
