"""The only reader of the store that finds changed jobs, by their change numbers.

It reads on from the first change that was perhaps not visible at its last poll, so it misses no
change, and may find one twice. See store/change_numbers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Integer, String, bindparam, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.store import listing
from holdfast_service.store.change_numbers import FirstUnsettled
from holdfast_service.store.models import JobRecord, RemovedJob
from holdfast_service.store.statement import Statement

MAX_ROWS_PER_POLL = 5_000
"""Maximum rows read by one poll; the next poll continues after them."""

ALL = 2**31 - 1
_SINCE = bindparam("since", type_=JobRecord.changed.type)
_AFTER = bindparam("after", type_=String)
_MOST = bindparam("most", type_=Integer)
_UNSETTLED = FirstUnsettled().label("unsettled")
FIRST_UNSETTLED = Statement(select(_UNSETTLED))
"""All changes below this number are visible, now and later."""
WRITTEN = Statement(
    select(*listing.ROW_COLUMNS, JobRecord.log_lines, _UNSETTLED)
    .where(tuple_(JobRecord.changed, JobRecord.id) > tuple_(_SINCE, _AFTER))
    .order_by(JobRecord.changed, JobRecord.id)
    .limit(_MOST)
)
"""The jobs written at change `since` or later; at `since` those with an id after `after`."""
REMOVED = Statement(
    select(RemovedJob.id, _UNSETTLED)
    .where(RemovedJob.changed >= _SINCE)
    .order_by(RemovedJob.changed)
    .limit(_MOST)
)
"""The jobs removed at change `since` or later."""


@dataclass(frozen=True)
class Changes:
    """What a poll found. `written`: columns of a list row, and `log_lines`; in the order of change
    numbers. `settled`: after it, all changes below this number were found."""

    written: Sequence[Any]
    removed: Sequence[str]
    settled: int


class ChangedJobs:
    """Finds the jobs written or removed since the last poll."""

    def __init__(self) -> None:
        self.settled = 0
        """All changes below this number were found."""
        self._after = (0, "")
        """Change number and id of the job after which the next poll continues."""
        self._unsettled: int | None = None
        """If a poll found more rows than it may read: the first change that was perhaps not visible
        when the first of these polls began."""
        self._removed: set[str] = set()
        """The removed jobs of the last poll; the next one may find them again."""

    async def start(self, session: AsyncSession) -> None:
        """Start from the current state."""
        self._settle(await FIRST_UNSETTLED.value(session) or 0)
        self._removed = set()

    async def poll(self, session: AsyncSession) -> Changes:
        number, job_id = self._after
        written = await WRITTEN.all(session, since=number, after=job_id, most=MAX_ROWS_PER_POLL)
        removed = await REMOVED.all(session, since=self.settled, most=ALL)
        if self._unsettled is None:
            self._unsettled = next((row.unsettled for row in (*written, *removed)), None)
        if len(written) == MAX_ROWS_PER_POLL:
            self._after = written[-1].changed, written[-1].id
        elif self._unsettled is not None:
            self._settle(self._unsettled)
        new = [job.id for job in removed if job.id not in self._removed]
        self._removed = {job.id for job in removed}
        return Changes(written, new, self.settled)

    def _settle(self, number: int) -> None:
        self.settled, self._after, self._unsettled = number, (number, ""), None
