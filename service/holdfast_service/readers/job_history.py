"""The history of one job, as the API reads it: attempts, incidents, goodput, events, metrics and
digests. Reads only, and a page at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import aclosing

from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.errors import UnknownMetric
from holdfast_service.job_model.goodput import History
from holdfast_service.job_model.lifecycle import State
from holdfast_service.readers.goodput_cache import GoodputCache
from holdfast_service.readers.metric_series import (
    Row,
    charted,
    discarded_point_budget,
    point,
    thinned_with_extremes,
)
from holdfast_service.store import accounts, queries, series
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import find_job, read_job, spec_of
from holdfast_service.store.models import JobRecord
from holdfast_service.views.goodput import GoodputView
from holdfast_service.views.history import DigestView, DiscardedView
from holdfast_service.views.pages import (
    AttemptPage,
    DigestPage,
    EventPage,
    IncidentPage,
    MetricPage,
    next_number,
)
from holdfast_workers.protocol.metrics import METRICS

ALL_STEPS = -1
"""Steps above this one are all: a program may begin with step 0."""
_GOODPUT_CACHE_S = 60.0
_MAX_DISCARDED_POINTS = 1000
_MAX_DISCARDED_ATTEMPTS = 100


class JobHistory:
    """Calls raise :class:`JobNotFound` for an id that belongs to no job."""

    def __init__(self, store: Store, accounts: GoodputCache) -> None:
        self._store = store
        self._accounts = accounts
        self._goodputs: dict[str, tuple[float, GoodputView]] = {}

    async def attempts(self, job_id: str, after: int = 0, limit: int = 1000) -> AttemptPage:
        """The entries with a number above `after`."""
        async with self._store.read() as session:
            await find_job(session, job_id)
            found = await queries.attempt_views(session, job_id, after, limit + 1)
        items = tuple(found[:limit])
        return AttemptPage(items=items, next_cursor=next_number(found, limit))

    async def incidents(self, job_id: str, after: int = 0, limit: int = 1000) -> IncidentPage:
        """The entries with a number above `after`."""
        async with read_job(self._store, job_id) as (session, job):
            lost = await self._lost_by_incident(session, job) if job.incidents else {}
            formed = await accounts.formed_worlds(session, job.id) if job.incidents else []
            found = await queries.incident_views(
                session, job, after, limit + 1, lost=lost, formed=formed
            )
        items = tuple(found[:limit])
        return IncidentPage(items=items, next_cursor=next_number(found, limit))

    async def goodput(self, job_id: str, max_age_s: float = 0.0) -> GoodputView:
        """The division of the job's time so far. It is computed from every row of every step, so
        callers that ask often accept a result up to `max_age_s` old. Raises SpecUnreadable."""
        known = self._goodputs.get(job_id)
        if known is not None and time.monotonic() - known[0] < max_age_s:
            return known[1]
        async with self._store.read() as session:
            return await self._compute_goodput(session, await find_job(session, job_id))

    async def events(self, job_id: str, after: int = 0, limit: int = 200) -> EventPage:
        """Events with a number above `after`, at most `limit`, without waiting."""
        async with read_job(self._store, job_id) as (session, job):
            events = await queries.event_views(session, job_id, after, limit)
        last = events[-1].seq if events else after
        state = State(job.state)
        is_last = last >= job.event_seq
        return EventPage(
            items=tuple(events),
            next_cursor=None if is_last or not events else str(last),
            last_seq=last,
            state=state,
            ended=state.terminal and is_last,
        )

    async def metrics(
        self,
        job_id: str,
        names: Collection[str] | None = None,
        after_step: int = ALL_STEPS,
        limit: int = 1000,
        points: int | None = None,
        until_step: int | None = None,
        discarded: bool = False,
    ) -> MetricPage:
        """The committed history: one point per step, from the latest attempt that computed it.

        `names` None: all metrics. `points`: at most so many of the whole rest of the series, among
        them the extremes of each metric, instead of a page of `limit`. `discarded`: also the points
        that rollbacks discarded. Raises UnknownMetric.
        """
        found: list[Row] = []
        more = False
        rolled_back: Mapping[int, Sequence[Row]] = {}
        async with read_job(self._store, job_id) as (session, job):
            selected = _select_metrics(job, names)
            if points is not None:
                known = max(job.steps, job.step or 0, job.cursor_step)
                until = known if until_step is None else until_step
                found = await self._charted(session, job, selected, after_step, until, points)
            else:
                async with aclosing(series.read_rows(session, job_id, after_step)) as rows:
                    async for row in rows:
                        if until_step is not None and row[0] > until_step:
                            break
                        if len(found) == limit:
                            more = True
                            break
                        found.append(row)
            if discarded:
                history = History(await accounts.runs(session, job.id))
                rolled_back = await series.read_discarded(session, job.id, after_step, history)
        last_step = found[-1][0] if found else after_step
        return MetricPage(
            items=tuple(point(selected, *row) for row in found),
            next_cursor=str(last_step) if more else None,
            names=selected,
            last_step=last_step,
            discarded=tuple(
                DiscardedView(
                    attempt=attempt,
                    points=tuple(
                        point(selected, *row)
                        for row in thinned_with_extremes(
                            rows,
                            selected,
                            discarded_point_budget(
                                len(rows), found, points or _MAX_DISCARDED_POINTS
                            ),
                        )
                    ),
                )
                for attempt, rows in sorted(rolled_back.items())[-_MAX_DISCARDED_ATTEMPTS:]
            ),
        )

    async def digests(self, job_id: str, after_step: int = 0, limit: int = 10_000) -> DigestPage:
        """Digest of the whole state after each step, of the committed history."""
        found: list[DigestView] = []
        more = False
        async with self._store.read() as session:
            await find_job(session, job_id)
            async with aclosing(series.read_digests(session, job_id, after_step)) as stored:
                async for step, digest in stored:
                    if len(found) == limit:
                        more = True
                        break
                    found.append(DigestView(step=step, digest=digest))
        next_cursor = str(found[-1].step) if more else None
        return DigestPage(items=tuple(found), next_cursor=next_cursor)

    async def _lost_by_incident(self, session: AsyncSession, job: JobRecord) -> Mapping[int, float]:
        """Incident -> device-seconds that it cost."""
        account = await self._accounts.get(session, job)
        return {
            incident: lost_device_s
            for incident, lost_device_s in account.lost_device_s.items()
            if incident is not None
        }

    async def _compute_goodput(self, session: AsyncSession, job: JobRecord) -> GoodputView:
        spec_of(job)  # an unreadable spec does not state the devices ahead of the first attempt
        account = await accounts.goodput(session, job, time.time())
        view = queries.goodput_view(job, account)
        oldest = time.monotonic() - _GOODPUT_CACHE_S
        fresh = {key: entry for key, entry in self._goodputs.items() if entry[0] > oldest}
        self._goodputs = {**fresh, job.id: (time.monotonic(), view)}
        return view

    async def _charted(
        self,
        session: AsyncSession,
        job: JobRecord,
        names: Sequence[str],
        after_step: int,
        until_step: int,
        points: int,
    ) -> list[Row]:
        """Rows for a chart, read from outlines where a bucket of the chart spans a whole chunk."""
        last = min(until_step, max(job.step or 0, job.cursor_step))
        buckets = max(1, points // (2 * len(charted(names))))
        if (last - after_step) // series.WINDOW > buckets:
            rows = await series.read_outlined(session, job.id, after_step, until_step)
        else:
            rows = []
            async with aclosing(series.read_rows(session, job.id, after_step)) as stored:
                async for row in stored:
                    if row[0] > until_step:
                        break
                    rows.append(row)
        if len(rows) <= points:
            return rows  # as `thinned_with_extremes` would
        return await asyncio.to_thread(thinned_with_extremes, rows, names, points)


def _select_metrics(job: JobRecord, names: Collection[str] | None) -> tuple[str, ...]:
    """The metrics in `names`, or all of the job's metrics if it is None. Raises UnknownMetric."""
    available = (*METRICS, *job.own_metrics)
    if names is None:
        return available
    for name in names:
        if name not in available:
            raise UnknownMetric(
                f"the job has no metric {name!r}: use {', '.join(available)}; a function's own "
                "metrics appear once it has reported them with ctx.step(metrics=...)"
            )
    return tuple(dict.fromkeys(names))
