"""What is told of the rows of all jobs: found by their change numbers, numbered, kept a while.

A job that merely advanced is told of at a bounded rate (`live_rows_per_s`), the newest state of
each in turn; a change of state is told at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog
from sqlalchemy import func, literal_column, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.lifecycle import State
from holdfast_service.live.stream_cursor import Batch, Message, Position, reset
from holdfast_service.settings import Settings
from holdfast_service.store import listing
from holdfast_service.store.change_numbers import NOT_YET_READ
from holdfast_service.store.models import Job
from holdfast_service.views.lists import JobRow

KEPT = 20_000
"""Told last, for those who come back; about 10 MB."""
CATCH_UP = 2_000
"""More than so many jobs that changed meanwhile are not told one by one."""
KEPT_ENDED = 20_000
"""Jobs that have ended are remembered, so as not to be told again for nothing."""
MOST_AT_ONCE = 5_000
"""Rows that one look reads; the next one goes on."""
_APART_S = 0.001
_MOST_APART_S = 1.5
"""Between two messages of progress alone, for each who listens: what it costs grows with them."""

log = structlog.get_logger(__name__)


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
class _Known:
    """What is known of a job: what of it is told at once, and its row, if it was read."""

    gist: tuple[object, ...]
    row: JobRow | None = None


class Rows:
    """The rows of every job, as this process has told of them. Numbers only grow."""

    def __init__(self, hub: str, postgres: bool, settings: Settings) -> None:
        self.number = 0
        """Of the row told last."""
        self.known: dict[str, _Known] = {}
        self.pending: dict[str, tuple[JobRow, int]] = {}
        """To be told in their turn, each with the change number since which it is."""
        self._hub = hub
        self._postgres = postgres
        self._settings = settings
        self._told: deque[_Told] = deque(maxlen=KEPT)
        self._changed = 0
        self._page: _Page | None = None
        self._ended: dict[str, None] = {}  # of the known ones, the last to be told at the end
        self._shared: tuple[int, Batch | None] = (0, None)  # beyond which row, all there is
        self._told_at = 0.0
        self._allowance = 0.0

    def told_upto(self) -> int:
        """No change up to this one waits for its turn to be told. (Those that wait stand in the
        order of the numbers since which they do.)"""
        oldest = next(iter(self.pending.values()), None)
        return self._changed if oldest is None else min(self._changed, oldest[1] - 1)

    async def begin(self, session: AsyncSession) -> None:
        """From now on. What was told before is beyond what is remembered."""
        self._told.clear()
        self.pending.clear()
        self._page = None
        self._changed = await self._newest_change(session)
        self.known, self._ended = await _gists(session), {}
        self.number += 1  # so that a position of before is not taken for one of now

    async def look(self, session: AsyncSession) -> list[str]:
        """Read the jobs that were written since the last look, and find out what is to be told of
        them; their ids."""
        upto = await self._upto(session)
        page = self._page or _Page(self._changed, "", upto)
        written = await self._written_since(session, self._changed, MOST_AT_ONCE, page)
        readable = []
        for one in written:
            row = _readable(one)
            if row is not None:
                readable.append(row.id)
                # PostgreSQL: a lower number may yet be read, but none below where this look began.
                self._note(row, self._changed if self._postgres else one.changed)
        if written:
            page = replace(page, changed=written[-1].changed, job_id=written[-1].id)
        if len(written) == MOST_AT_ONCE:
            self._page = page
        else:
            self._page = None
            self._changed = max(self._changed, page.changed if page.upto is None else page.upto)
        return readable

    def tell_pending(self, listeners: int) -> None:
        """Of mere progress, as much as the rate and the number of those who listen allow now."""
        rate = self._settings.live_rows_per_s
        self._allowance = min(2 * rate, self._allowance + rate * self._settings.live_poll_s)
        now = time.monotonic()
        if now - self._told_at < min(_MOST_APART_S, listeners * _APART_S):
            return
        self._told_at = now
        while self.pending and self._allowance >= 1:
            job_id, (row, _) = next(iter(self.pending.items()))
            del self.pending[job_id]
            self._tell(row)
            self._allowance -= 1

    def beyond(self, here: Position) -> Batch | None:
        """What was told after that position, which is one of this hub; None: nothing."""
        missing = self.number - here.row
        if missing <= 0:
            return None
        plain = here.job == "-"
        if plain and self._shared[0] == here.row and self._shared[1] is not None:
            return self._shared[1]
        if missing > len(self._told):
            here = replace(here, row=self.number, changed=self.told_upto())
            return Batch([reset("the listener is too slow", here)])
        first = len(self._told) - missing
        batch = Batch(
            [_message(self._told[index], here) for index in range(first, len(self._told))]
        )
        if plain:
            self._shared = (here.row, batch)
        return batch

    async def missed(
        self, session: AsyncSession, cursor: Position, at: Position, upto: int
    ) -> list[Message]:
        """What a listener at `cursor` missed up to the row `upto`; positions begin with `at`."""
        if cursor.hub == self._hub and 0 <= upto - cursor.row <= len(self._told):
            kept = [told for told in self._told if cursor.row < told.number <= upto]
            return [_message(told, at) for told in kept]
        newest = await self._newest_change(session)
        if cursor.changed > newest:
            return [reset("the store is another one", at)]
        written = await self._written_since(session, cursor.changed, CATCH_UP + 1)
        if len(written) > CATCH_UP:
            return [reset("too much has changed meanwhile", at)]
        rows = [row for row in map(_readable, written) if row is not None]
        return [Message("row", row.model_dump_json(), at) for row in rows]

    def _note(self, row: JobRow, changed: int) -> None:
        """A job that was written at `changed` or later: told now if its state is another, or in
        its turn."""
        gist = _gist(row)
        known = self.known.get(row.id)
        if known is not None and known.row == row:
            return
        self._remember(_Known(gist, row), row)
        if known is None or known.gist != gist:
            self.pending.pop(row.id, None)
            self._tell(row)
        else:
            since = self.pending[row.id][1] if row.id in self.pending else changed
            self.pending[row.id] = (row, since)

    def _remember(self, known: _Known, row: JobRow) -> None:
        self.known[row.id] = known
        if row.state.terminal:
            self._ended.pop(row.id, None)
            self._ended[row.id] = None
        if len(self._ended) > KEPT_ENDED:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self.known.pop(oldest, None)

    def _tell(self, row: JobRow) -> None:
        self.number += 1
        self._told.append(_Told(self.number, self.told_upto(), row.model_dump_json()))

    async def _upto(self, session: AsyncSession) -> int | None:
        """PostgreSQL: changes below this number are all visible in this snapshot."""
        if not self._postgres:
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
        later = Job.changed >= changed if self._postgres else Job.changed > changed
        jobs = select(*listing.SHOWN).where(later)
        if page is not None and page.job_id:
            jobs = jobs.where(
                Job.changed >= page.changed, or_(Job.changed > page.changed, Job.id > page.job_id)
            )
        return (await session.execute(jobs.order_by(Job.changed, Job.id).limit(limit))).all()


def _message(told: _Told, at: Position) -> Message:
    return Message("row", told.payload, replace(at, row=told.number, changed=told.changed))


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
