"""The live feed of job rows: numbers the rows of changed jobs, and keeps the latest.

Rows that only show progress are sent at a bounded rate (`live_rows_per_s`), always with the newest
values; a change of state is sent at once.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import structlog
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.lifecycle import State
from holdfast_service.live.changed_jobs import FIRST_UNSETTLED, REMOVED, WRITTEN, Changes
from holdfast_service.live.stream_cursor import Batch, Position, StreamMessage, reset
from holdfast_service.store import listing
from holdfast_service.store.models import JobRecord
from holdfast_service.views.lists import JobRow
from holdfast_service.views.live import LiveRemoved
from holdfast_service.views.view import View

MAX_KEPT = 20_000
"""Messages kept for listeners that reconnect; about 10 MB."""
MAX_CATCH_UP_ROWS = 2_000
"""If more jobs than this changed, a reconnecting listener gets a reset instead of the rows."""
MAX_ENDED_KEPT = 20_000
"""Ended jobs that are remembered, so that their rows are not sent again without a change."""
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
    """A `row` or a `removed` message with its number on this hub. Changes below `changed` were sent
    before it."""

    number: int
    changed: int
    kind: str
    payload: str


@dataclass(frozen=True)
class _Known:
    """The last known urgent fields of a job, and its row, if it was read."""

    urgent: tuple[object, ...]
    row: JobRow | None = None


class JobRowFeed:
    """The rows of all jobs as this process sent them. Row numbers only grow."""

    def __init__(self, hub: str, rows_per_s: float, poll_s: float) -> None:
        self.started = False
        self.number = 0
        """Number of the row sent last."""
        self.known: dict[str, _Known] = {}
        self.pending: dict[str, tuple[JobRow, int]] = {}
        """Progress rows to send, by job id, each with the change number since which it waits."""
        self._hub = hub
        self._rows_per_s = rows_per_s
        self._poll_s = poll_s
        self._kept: deque[_NumberedRow] = deque(maxlen=MAX_KEPT)
        self._settled = 0
        """All changes below this number are sent or pending."""
        self._ended: dict[str, None] = {}  # ended jobs in `known`, the oldest first
        self._shared: tuple[int, Batch | None] = (
            0,
            None,
        )  # (row number, batch of all rows after it)
        self._progress_sent_at = 0.0
        self._allowance = 0.0

    def sent_below(self) -> int:
        """All changes below this number are sent. (Pending rows are in the order of the change
        numbers since which they wait.)"""
        oldest = next(iter(self.pending.values()), None)
        return self._settled if oldest is None else min(self._settled, oldest[1])

    async def start(self, session: AsyncSession, settled: int) -> None:
        """Start from the current state, and drop the rows sent before. `settled`: where the polls
        that follow continue."""
        self._kept.clear()
        self.pending.clear()
        self._settled = settled
        self.known, self._ended = await _known_jobs(session), {}
        self.number += 1  # an older position must not look current
        self.started = True

    def record(self, changes: Changes) -> None:
        """Queue or send the rows of the jobs that a poll found, and send the removals."""
        for written in changes.written:
            row = _row_or_none(written)
            if row is not None:
                self._record_row(row)
        for job_id in changes.removed:
            self.known.pop(job_id, None)
            self.pending.pop(job_id, None)
            self._ended.pop(job_id, None)
            self._append("removed", LiveRemoved(id=job_id))
        self._settled = changes.settled

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
            here = replace(here, row=self.number, changed=self.sent_below())
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
        if cursor.changed > (await FIRST_UNSETTLED.value(session) or 0):
            return [reset("the database was replaced", at)]
        missed = {"since": cursor.changed, "most": MAX_CATCH_UP_ROWS + 1}
        written = await WRITTEN.all(session, after="", **missed)
        removed = await REMOVED.all(session, **missed)
        if max(len(written), len(removed)) > MAX_CATCH_UP_ROWS:
            return [reset("too many jobs changed since the last message", at)]
        rows = [row for row in map(_row_or_none, written) if row is not None]
        gone = [LiveRemoved(id=job.id) for job in removed]
        return [
            *(StreamMessage("row", row.model_dump_json(), at) for row in rows),
            *(StreamMessage("removed", job.model_dump_json(), at) for job in gone),
        ]

    def _record_row(self, row: JobRow) -> None:
        """Send a row at once if its state changed, otherwise with the pending progress rows."""
        urgent = _urgent_fields(row, row.waiting.resource if row.waiting else None)
        known = self.known.get(row.id)
        if known is not None and known.row == row:
            return
        self._remember(_Known(urgent, row), row)
        if known is None or known.urgent != urgent:
            self.pending.pop(row.id, None)
            self._append("row", row)
        else:
            since = self.pending[row.id][1] if row.id in self.pending else self._settled
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

    def _append(self, kind: str, content: View) -> None:
        self.number += 1
        self._kept.append(
            _NumberedRow(self.number, self.sent_below(), kind, content.model_dump_json())
        )


def _message(row: _NumberedRow, at: Position) -> StreamMessage:
    return StreamMessage(row.kind, row.payload, replace(at, row=row.number, changed=row.changed))


async def _known_jobs(session: AsyncSession) -> dict[str, _Known]:
    """The urgent fields of all jobs that have not ended."""
    live = [state.value for state in State if not state.terminal]
    found = await session.execute(select(*listing.ROW_COLUMNS).where(JobRecord.state.in_(live)))
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
