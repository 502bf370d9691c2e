"""The live feed of job rows: finds changed rows by change number, numbers them, keeps the latest.

Rows that only show progress are sent at a bounded rate (`live_rows_per_s`), always with the newest
values; a change of state is sent at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog
from sqlalchemy import literal_column, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.lifecycle import State
from holdfast_service.live.stream_cursor import Batch, Position, StreamMessage, reset
from holdfast_service.store import listing
from holdfast_service.store.change_numbers import OLDEST_RUNNING_TRANSACTION, NextChange
from holdfast_service.store.models import JobRecord, RemovedJob
from holdfast_service.views.lists import JobRow
from holdfast_service.views.live import LiveRemoved
from holdfast_service.views.view import View

MAX_KEPT = 20_000
"""Messages kept for listeners that reconnect; about 10 MB."""
MAX_CATCH_UP_ROWS = 2_000
"""If more jobs than this changed, a reconnecting listener gets a reset instead of the rows."""
MAX_ENDED_KEPT = 20_000
"""Ended jobs that are remembered, so that their rows are not sent again without a change."""
MAX_ROWS_PER_POLL = 5_000
"""Maximum rows read by one poll; the next poll continues after them."""
ROWS_PER_S = 100.0
"""Most rows per second that a listener gets of jobs that only advanced; changes of state are sent
at once and do not count."""
_PROGRESS_INTERVAL_S = 0.001
_MAX_PROGRESS_INTERVAL_S = 1.5
"""Time between two batches of progress rows, per listener and at most: the cost of a batch grows
with the number of listeners."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _NumberedRow:
    """A `row` or a `removed` message with its number on this hub."""

    number: int
    changed: int
    kind: str
    payload: str


@dataclass(frozen=True)
class _Page:
    """The job after which the next poll continues, if a poll found more rows than it may read.
    `upto`: the value of `_first_unsettled_change` when the first of these polls began; changes
    after it may have become visible since."""

    changed: int
    job_id: str
    upto: int | None


@dataclass(frozen=True)
class _Known:
    """The last known urgent fields of a job, and its row, if it was read."""

    urgent: tuple[object, ...]
    row: JobRow | None = None


class JobRowFeed:
    """The rows of all jobs as this process sent them. Row numbers only grow."""

    def __init__(self, hub: str, postgres: bool, rows_per_s: float, poll_s: float) -> None:
        self.number = 0
        """Number of the row sent last."""
        self.known: dict[str, _Known] = {}
        self.pending: dict[str, tuple[JobRow, int]] = {}
        """Progress rows to send, by job id, each with the change number since which it waits."""
        self._hub = hub
        self._postgres = postgres
        self._rows_per_s = rows_per_s
        self._poll_s = poll_s
        self._kept: deque[_NumberedRow] = deque(maxlen=MAX_KEPT)
        self._changed = 0
        self._page: _Page | None = None
        self._ended: dict[str, None] = {}  # ended jobs in `known`, the oldest first
        self._removals_seen = 0
        """SQLite: change number of the newest removal that was sent."""
        self._removed: set[str] = set()
        """The removed jobs that the last poll found; PostgreSQL finds them again for a while."""
        self._shared: tuple[int, Batch | None] = (
            0,
            None,
        )  # (row number, batch of all rows after it)
        self._progress_sent_at = 0.0
        self._allowance = 0.0

    def sent_up_to(self) -> int:
        """The change number up to which all changes are sent. (Pending rows are in the order of the
        change numbers since which they wait.)"""
        oldest = next(iter(self.pending.values()), None)
        return self._changed if oldest is None else min(self._changed, oldest[1] - 1)

    async def start(self, session: AsyncSession) -> None:
        """Start from the current state, and drop the rows sent before."""
        self._kept.clear()
        self.pending.clear()
        self._page = None
        self._changed = self._removals_seen = await self._newest_change(session)
        self._removed = set()
        self.known, self._ended = await _known_jobs(session), {}
        self.number += 1  # an older position must not look current

    async def poll(self, session: AsyncSession) -> list[str]:
        """Read the jobs written or removed since the last poll, and queue or send their rows.
        Returns their ids."""
        upto = await self._first_unsettled_change(session)
        page = self._page or _Page(self._changed, "", upto)
        written = await self._written_since(session, self._changed, MAX_ROWS_PER_POLL, page)
        readable = []
        for record in written:
            row = _row_or_none(record)
            if row is not None:
                readable.append(row.id)
                # PostgreSQL: a lower number may still appear, but none below this poll's start.
                self._record_row(row, self._changed if self._postgres else record.changed)
        # Read after the rows: a removal with a lower number than one of them is visible by now.
        readable += await self._read_removals(session)
        if written:
            page = replace(page, changed=written[-1].changed, job_id=written[-1].id)
        if len(written) == MAX_ROWS_PER_POLL:
            self._page = page
        else:
            self._page = None
            self._changed = max(self._changed, page.changed if page.upto is None else page.upto)
        return readable

    def send_pending(self, listeners: int) -> None:
        """Send progress rows, as many as the rate and the number of listeners allow now."""
        rate = self._rows_per_s
        self._allowance = min(2 * rate, self._allowance + rate * self._poll_s)
        now = time.monotonic()
        if now - self._progress_sent_at < min(
            _MAX_PROGRESS_INTERVAL_S, listeners * _PROGRESS_INTERVAL_S
        ):
            return
        self._progress_sent_at = now
        while self.pending and self._allowance >= 1:
            job_id, (row, _) = next(iter(self.pending.items()))
            del self.pending[job_id]
            self._append("row", row)
            self._allowance -= 1

    def messages_after(self, here: Position) -> Batch | None:
        """The rows sent after `here`, a position on this hub; None if there are none."""
        missing = self.number - here.row
        if missing <= 0:
            return None
        plain = here.job == "-"
        if plain and self._shared[0] == here.row and self._shared[1] is not None:
            return self._shared[1]
        if missing > len(self._kept):
            here = replace(here, row=self.number, changed=self.sent_up_to())
            return Batch([reset("the listener is too slow", here)])
        first = len(self._kept) - missing
        batch = Batch(
            [_message(self._kept[index], here) for index in range(first, len(self._kept))]
        )
        if plain:
            self._shared = (here.row, batch)
        return batch

    async def catch_up(
        self, session: AsyncSession, cursor: Position, at: Position, upto: int
    ) -> list[StreamMessage]:
        """The messages that a listener at `cursor` missed up to row `upto`; their positions derive
        from `at`."""
        if cursor.hub == self._hub and 0 <= upto - cursor.row <= len(self._kept):
            kept = [row for row in self._kept if cursor.row < row.number <= upto]
            return [_message(row, at) for row in kept]
        newest = await self._newest_change(session)
        if cursor.changed > newest:
            return [reset("the database was replaced", at)]
        written = await self._written_since(session, cursor.changed, MAX_CATCH_UP_ROWS + 1)
        removed = await self._removed_since(session, cursor.changed, MAX_CATCH_UP_ROWS + 1)
        if max(len(written), len(removed)) > MAX_CATCH_UP_ROWS:
            return [reset("too many jobs changed since the last message", at)]
        rows = [row for row in map(_row_or_none, written) if row is not None]
        return [
            *(StreamMessage("row", row.model_dump_json(), at) for row in rows),
            *(StreamMessage("removed", job.model_dump_json(), at) for _, job in removed),
        ]

    def _record_row(self, row: JobRow, changed: int) -> None:
        """Send the row of a job written at `changed` or later: at once if its state changed,
        otherwise with the pending progress rows."""
        urgent = _urgent_fields(row, row.waiting.resource if row.waiting else None)
        known = self.known.get(row.id)
        if known is not None and known.row == row:
            return
        self._remember(_Known(urgent, row), row)
        if known is None or known.urgent != urgent:
            self.pending.pop(row.id, None)
            self._append("row", row)
        else:
            since = self.pending[row.id][1] if row.id in self.pending else changed
            self.pending[row.id] = (row, since)

    def _remember(self, known: _Known, row: JobRow) -> None:
        self.known[row.id] = known
        if row.state.terminal:
            self._ended.pop(row.id, None)
            self._ended[row.id] = None
        if len(self._ended) > MAX_ENDED_KEPT:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self.known.pop(oldest, None)

    async def _read_removals(self, session: AsyncSession) -> list[str]:
        """Send the removals since the last poll; returns the ids of the removed jobs."""
        since = self._changed if self._postgres else self._removals_seen
        found = await self._removed_since(session, since)
        new = [job for _, job in found if job.id not in self._removed]
        for job in new:
            self.known.pop(job.id, None)
            self.pending.pop(job.id, None)
            self._ended.pop(job.id, None)
            self._append("removed", job)
        self._removed = {job.id for _, job in found}
        self._removals_seen = max([self._removals_seen, *(changed for changed, _ in found)])
        return [job.id for job in new]

    def _append(self, kind: str, content: View) -> None:
        self.number += 1
        self._kept.append(
            _NumberedRow(self.number, self.sent_up_to(), kind, content.model_dump_json())
        )

    async def _first_unsettled_change(self, session: AsyncSession) -> int | None:
        """PostgreSQL: changes below this number are all visible in this snapshot."""
        if not self._postgres:
            return None
        return int(
            (await session.execute(select(literal_column(OLDEST_RUNNING_TRANSACTION)))).scalar_one()
        )

    async def _newest_change(self, session: AsyncSession) -> int:
        upto = await self._first_unsettled_change(session)
        if upto is not None:
            return upto
        return (await session.execute(select(NextChange()))).scalar_one() - 1

    async def _written_since(
        self, session: AsyncSession, changed: int, limit: int, page: _Page | None = None
    ) -> Sequence[Any]:
        """The list columns of the jobs written since `changed`, in the order of change numbers."""
        later = JobRecord.changed >= changed if self._postgres else JobRecord.changed > changed
        jobs = select(*listing.ROW_COLUMNS).where(later)
        if page is not None and page.job_id:
            jobs = jobs.where(
                JobRecord.changed >= page.changed,
                or_(JobRecord.changed > page.changed, JobRecord.id > page.job_id),
            )
        return (
            await session.execute(jobs.order_by(JobRecord.changed, JobRecord.id).limit(limit))
        ).all()

    async def _removed_since(
        self, session: AsyncSession, changed: int, limit: int | None = None
    ) -> list[tuple[int, LiveRemoved]]:
        """The jobs removed since `changed`, each with its change number."""
        later = RemovedJob.changed >= changed if self._postgres else RemovedJob.changed > changed
        found = select(RemovedJob.changed, RemovedJob.id).where(later)
        rows = await session.execute(found.order_by(RemovedJob.changed).limit(limit))
        return [(number, LiveRemoved(id=job_id)) for number, job_id in rows]


def _message(row: _NumberedRow, at: Position) -> StreamMessage:
    return StreamMessage(row.kind, row.payload, replace(at, row=row.number, changed=row.changed))


async def _known_jobs(session: AsyncSession) -> dict[str, _Known]:
    """The urgent fields of all jobs that have not ended."""
    live = [state.value for state in State if not state.terminal]
    found = await session.execute(
        select(
            JobRecord.id,
            JobRecord.state,
            JobRecord.desired,
            JobRecord.attempt,
            JobRecord.incidents,
            JobRecord.waiting,
            JobRecord.outcome_code,
            JobRecord.ended_at,
            JobRecord.name,
        ).where(JobRecord.state.in_(live))
    )
    return {
        job.id: _Known(_urgent_fields(job, job.waiting["resource"] if job.waiting else None))
        for job in found
    }


def _row_or_none(written: Any) -> JobRow | None:
    """The list row; None if the stored row is unreadable, which must not affect other jobs."""
    try:
        return listing.row(written)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        log.warning("live.row_unreadable", job=written.id, exc_info=error)
        return None


def _urgent_fields(job: Any, waits_for: str | None) -> tuple[object, ...]:
    """The fields whose changes are sent at once, of a list row or of a job's stored columns; all
    other fields are progress."""
    return (
        job.state,
        job.desired,
        job.attempt,
        job.incidents,
        waits_for,
        job.outcome_code,
        job.ended_at,
        job.name,
    )
