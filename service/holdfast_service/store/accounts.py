"""What is stored of a job's time: read for `goodput.account`, which decides.

Steps are read as the outlines of their chunks tell, and of these the sums alone, which the
database takes out of them; only where a rollback cut a chunk in two are its rows read, so that the
account of a hundred thousand steps costs a few milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.goodput import Goodput, History, Outage, Row, Run, Stretch, account
from holdfast_service.job_model.lifecycle import State
from holdfast_service.store import queries, series
from holdfast_service.store.json_safe import number
from holdfast_service.store.models import Attempt, Event, Job, MetricChunk
from holdfast_service.store.statement import JOB, Statement

_AT = series.COLUMNS.index("at")
_STEP_TIME = series.COLUMNS.index("step_time_s")
_WITH_ROWS = Statement(select(MetricChunk.attempt).where(MetricChunk.job_id == JOB).distinct())
_MOVES = Statement(
    select(Event.at, Event.data)
    .where(Event.job_id == JOB, Event.kind.in_(("job.submitted", "job.state")))
    .order_by(Event.seq)
)
_ATTEMPTS = Statement(
    select(Attempt.number, Attempt.restore, Attempt.cause_incident, Attempt.running_at).where(
        Attempt.job_id == JOB
    )
)
_OUTLINES = Statement(
    select(
        MetricChunk.window,
        MetricChunk.attempt,
        *(MetricChunk.outline[name].as_integer() for name in ("first", "last")),
        *(MetricChunk.outline[name].as_float() for name in ("since", "until", "busy_s")),
        MetricChunk.outline["steps"].as_integer(),
    ).where(MetricChunk.job_id == JOB)
)


@dataclass(frozen=True)
class Stay:
    """Some time that a job was on the cluster, or off it in one state."""

    since: float
    until: float
    state: State
    """The first of them."""

    @property
    def held(self) -> bool:
        return self.state.on_cluster


async def goodput(session: AsyncSession, job: Job, now: float) -> Goodput:
    """Where the job's time went until `now`, or until it ended."""
    held = [(stay.since, stay.until) for stay in await stays(session, job.id, now) if stay.held]
    with_rows = set(await _WITH_ROWS.values(session, job=job.id))
    found = await runs(session, job.id, with_rows)
    return account(
        held,
        await _steps(session, job.id, History(found)),
        found,
        await _outages(session, job.id),
        ended=State(job.state).terminal,
    )


async def stays(session: AsyncSession, job_id: str, now: float) -> list[Stay]:
    """When the job had, or was getting, resources on the cluster, and when it had none."""
    moves = await _MOVES.all(session, job=job_id)
    found: list[Stay] = []
    since, state, newest = 0.0, None, 0.0
    for at, data in moves:
        newest = max(newest, at)  # told by several clocks
        new = State(data["to"]) if "to" in data else State.QUEUED
        if state is None:
            since, state = newest, new
        elif not (new.on_cluster and state.on_cluster):
            found.append(Stay(since, newest, state))
            since, state = newest, new
    if state is not None and not state.terminal:
        found.append(Stay(since, max(since, now), state))
    return found


async def runs(session: AsyncSession, job_id: str, with_rows: set[int]) -> list[Run]:
    """Attempts that came to make steps: only they take the place of what was before."""
    attempts = await _ATTEMPTS.all(session, job=job_id)
    return [
        Run(number_, int(restore.get("step") or 0), incident)
        for number_, restore, incident, running_at in attempts
        if running_at is not None or number_ in with_rows
    ]


async def _steps(session: AsyncSession, job_id: str, history: History) -> list[Row | Stretch]:
    """Of all attempts, also those that were replaced."""
    found: list[Row | Stretch] = []
    in_full: list[tuple[int, int]] = []
    chunks = await _OUTLINES.all(session, job=job_id)
    for place, attempt, first, last, *sums in chunks:
        if first is None or not history.is_one(attempt, first, last):
            in_full.append((place, attempt))
        else:
            found.append(Stretch(attempt, first, last, *sums))
    for place, attempt in in_full:
        chunk = await session.get_one(MetricChunk, (job_id, place, attempt))
        found += rows_of(chunk)
    return found


def rows_of(chunk: MetricChunk) -> list[Row]:
    """Its steps whose times are readable."""
    found: list[Row] = []
    for step, values in chunk.rows.items():
        at, step_time_s = number(values[_AT]), number(values[_STEP_TIME])
        if at is not None and step_time_s is not None:
            found.append(Row(chunk.attempt, int(step), at, step_time_s))
    return found


async def _outages(session: AsyncSession, job_id: str) -> list[Outage]:
    """Incidents that ended an attempt: others cost no time."""
    incidents = await queries.INCIDENTS.all(session, job=job_id)
    return [
        Outage(
            signalled_at=number(one.data.get("signalled_at")) or one.opened_at,
            closed_at=one.closed_at,
            phases_s={
                phase: seconds
                for phase, said in (one.data.get("phases_s") or {}).items()
                if (seconds := number(said)) is not None
            },
            incident=one.number,
        )
        for one in incidents
        if one.data.get("failures") or one.data.get("preemptions")
    ]
