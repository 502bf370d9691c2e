"""What is stored of a job's time: read for `goodput.account`, which decides."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.goodput import Goodput, Outage, Row, Run, account
from holdfast_service.lifecycle import State
from holdfast_service.store import series
from holdfast_service.store.models import Attempt, Event, Incident, Job, MetricChunk
from holdfast_service.store.storable import number

_AT = series.COLUMNS.index("at")
_STEP_TIME = series.COLUMNS.index("step_time_s")


async def goodput(session: AsyncSession, job: Job, now: float) -> Goodput:
    """Where the job's time went until `now`, or until it ended."""
    rows = await _rows(session, job.id)
    return account(
        await _held(session, job.id, now),
        rows,
        await _runs(session, job.id, {row.attempt for row in rows}),
        await _outages(session, job.id),
        ended=State(job.state).terminal,
    )


async def _rows(session: AsyncSession, job_id: str) -> list[Row]:
    """Of all attempts, also those that were replaced."""
    found: list[Row] = []
    chunks = await session.stream_scalars(select(MetricChunk).where(MetricChunk.job_id == job_id))
    async for chunk in chunks:
        for step, values in chunk.rows.items():
            at, step_time_s = number(values[_AT]), number(values[_STEP_TIME])
            if at is not None and step_time_s is not None:
                found.append(Row(chunk.attempt, int(step), at, step_time_s))
    return found


async def _held(session: AsyncSession, job_id: str, now: float) -> list[tuple[float, float]]:
    """When the job had, or was getting, resources on the cluster."""
    moves = await session.scalars(
        select(Event).where(Event.job_id == job_id, Event.kind == "job.state").order_by(Event.seq)
    )
    held: list[tuple[float, float]] = []
    since: float | None = None
    newest = 0.0
    for move in moves:
        newest = max(newest, move.at)  # told by several clocks
        on_cluster = State(move.data["to"]).on_cluster
        if on_cluster and since is None:
            since = newest
        elif not on_cluster and since is not None:
            held.append((since, newest))
            since = None
    if since is not None:
        held.append((since, max(since, now)))
    return held


async def _runs(session: AsyncSession, job_id: str, with_rows: set[int]) -> list[Run]:
    """Attempts that came to make steps: only they take the place of what was before."""
    attempts = await session.scalars(select(Attempt).where(Attempt.job_id == job_id))
    return [
        Run(one.number, int(one.restore.get("step") or 0), one.cause_incident)
        for one in attempts
        if one.running_at is not None or one.number in with_rows
    ]


async def _outages(session: AsyncSession, job_id: str) -> list[Outage]:
    """Incidents that ended an attempt: others cost no time."""
    incidents = await session.scalars(select(Incident).where(Incident.job_id == job_id))
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
