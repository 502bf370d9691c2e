"""Reads the stored inputs of `goodput.account`: state intervals, runs, steps, outages, absences.

A live job is accounted up to its supervisor's last report: what is not known is not counted, and is
added once the supervisor answers again.

This module only reads; `goodput.account` decides which time counts as productive. Steps come from
the outlines of their chunks, and of an outline the database extracts only the sums. Full rows are
read only where a rollback cut a chunk in two, so the account of a hundred thousand steps costs a
few milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.admission import stored_world_size
from holdfast_service.job_model.events.codec import decode, read_incident
from holdfast_service.job_model.events.kinds import EventKind
from holdfast_service.job_model.events.progress import AwayWhy, JobAwayEvent, JobStateEvent
from holdfast_service.job_model.goodput import (
    AttemptRun,
    CommittedStep,
    Goodput,
    History,
    Outage,
    StepRange,
    account,
)
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.program_levels import brings
from holdfast_service.job_model.world_history import (
    Absence,
    FormedWorld,
    without_steps,
    world_periods,
)
from holdfast_service.store import queries, series
from holdfast_service.store.json_safe import number
from holdfast_service.store.models import AttemptRow, Event, JobRecord, MetricChunk
from holdfast_service.store.statement import JOB, Statement
from holdfast_workers.protocol.codec import UnreadableDocument

REPORT_S = 15.0
"""A supervisor that lives reports more often, and that is stored."""
_AT = series.COLUMNS.index("at")
_STEP_TIME = series.COLUMNS.index("step_time_s")
_FIRST_ROWS = Statement(
    select(MetricChunk.attempt, func.min(MetricChunk.outline["first"].as_integer()))
    .where(MetricChunk.job_id == JOB)
    .group_by(MetricChunk.attempt)
)
_STATE_CHANGES = Statement(
    select(Event.at, Event.kind, Event.data)
    .where(Event.job_id == JOB, Event.kind.in_((EventKind.JOB_SUBMITTED, EventKind.JOB_STATE)))
    .order_by(Event.seq)
)
_STEP_ENDS = Statement(
    select(func.max(MetricChunk.outline["until"].as_float())).where(MetricChunk.job_id == JOB)
)
_ABSENCES = Statement(
    select(Event.at, Event.kind, Event.data)
    .where(Event.job_id == JOB, Event.kind == EventKind.JOB_AWAY)
    .order_by(Event.seq)
)
_ATTEMPTS = Statement(
    select(
        AttemptRow.number, AttemptRow.restore, AttemptRow.cause_incident, AttemptRow.running_at
    ).where(AttemptRow.job_id == JOB)
)
_WORLDS = Statement(
    select(AttemptRow.forming_at, AttemptRow.mesh, AttemptRow.world_size, AttemptRow.cause_incident)
    .where(AttemptRow.job_id == JOB, AttemptRow.world_size > 0)
    .order_by(AttemptRow.number)
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
class StateInterval:
    """A period during which a job was on the cluster, or off it in a single state."""

    since: float
    until: float
    state: State
    """The state at the start of the interval."""

    @property
    def held(self) -> bool:
        return self.state.on_cluster


async def goodput(session: AsyncSession, job: JobRecord, now: float) -> Goodput:
    """The goodput account of the job until `now`, or until the job ended."""
    intervals = await state_intervals(session, job, now)
    held = times_held(intervals)
    found = await runs(session, job.id)
    absences = await _absences(session, job.id)
    steps = await _steps(session, job.id, History(found), absences)
    return account(
        held,
        steps,
        found,
        await _outages(session, job.id),
        ended=State(job.state).terminal,
        worlds=world_periods(await formed_worlds(session, job.id), held),
        devices=stored_world_size(job.spec) or 1,
        absences=without_steps(absences, (step.at for step in steps)),
        is_program=brings(job.spec).is_program,
    )


def known_until(job: JobRecord, since: float, now: float) -> float:
    """Until when a job that has been on the cluster since `since` is known to be there."""
    return min(now, max(since, job.told_at or 0.0, job.held_since or 0.0))


async def last_sign_of_life(session: AsyncSession, job: JobRecord) -> float | None:
    """The last moment of the present stay on the cluster of which anything is stored: a report of
    the supervisor, or a step; None: the job is not on the cluster."""
    if job.held_since is None:
        return None
    step_ends = await _STEP_ENDS.value(session, job=job.id)
    return max(job.held_since, job.told_at or 0.0, step_ends or 0.0)


async def state_intervals(session: AsyncSession, job: JobRecord, now: float) -> list[StateInterval]:
    """The periods in which the job held, or acquired, cluster resources, and those without."""
    moves = await _STATE_CHANGES.all(session, job=job.id)
    found: list[StateInterval] = []
    since, state, newest = 0.0, None, 0.0
    for at, kind, data in moves:
        newest = max(newest, at)  # several clocks stamp these events
        event = decode(kind, data)
        new = event.new if isinstance(event, JobStateEvent) else State.QUEUED
        if state is None:
            since, state = newest, new
        elif not (new.on_cluster and state.on_cluster):
            found.append(StateInterval(since, newest, state))
            since, state = newest, new
    if state is not None and not state.terminal:
        until = known_until(job, since, now) if state.on_cluster else now
        found.append(StateInterval(since, max(since, until), state))
    return found


async def _absences(session: AsyncSession, job_id: str) -> list[Absence]:
    """The times in which nothing of the job ran, as reported."""
    found: list[Absence] = []
    for at, kind, data in await _ABSENCES.all(session, job=job_id):
        with suppress(UnreadableDocument):  # an event of its own says so
            event = decode(kind, data)
            if isinstance(event, JobAwayEvent):
                found.append(Absence(at - event.away_s, at, gone=event.why is AwayWhy.GONE))
    return found


def times_held(intervals: Sequence[StateInterval]) -> list[tuple[float, float]]:
    """The times on the cluster."""
    return [(interval.since, interval.until) for interval in intervals if interval.held]


async def formed_worlds(session: AsyncSession, job_id: str) -> list[FormedWorld]:
    """The meshes of the job's attempts, in order."""
    formed: list[FormedWorld] = []
    newest = 0.0
    for at, mesh, world_size, incident in await _WORLDS.all(session, job=job_id):
        newest = max(newest, at)  # several clocks stamp these events
        formed.append(FormedWorld(newest, mesh, world_size, incident))
    return formed


async def runs(session: AsyncSession, job_id: str) -> list[AttemptRun]:
    """The attempts that reached the training loop: only these replace earlier steps. An attempt
    that begins with step 0, as a program may, replaces that too."""
    first_rows = {row[0]: row[1] for row in await _FIRST_ROWS.all(session, job=job_id)}
    found: list[AttemptRun] = []
    for number_, restore, incident, running_at in await _ATTEMPTS.all(session, job=job_id):
        if running_at is not None or number_ in first_rows:
            restored = int(restore.get("step") or 0)
            first = first_rows.get(number_)
            restored = restored if first is None else min(restored, first - 1)
            found.append(AttemptRun(number_, restored, incident, running_at))
    return found


async def _steps(
    session: AsyncSession, job_id: str, history: History, absences: Sequence[Absence]
) -> list[CommittedStep | StepRange]:
    """The steps of all attempts, replaced steps included."""
    found: list[CommittedStep | StepRange] = []
    in_full: list[tuple[int, int]] = []
    chunks = await _OUTLINES.all(session, job=job_id)
    for window, attempt, first, last, *sums in chunks:
        if (
            first is None
            or not history.has_one_fate(attempt, first, last)
            or any(sums[0] < absence.until and absence.since < sums[1] for absence in absences)
        ):
            in_full.append((window, attempt))
        else:
            found.append(StepRange(attempt, first, last, *sums))
    for window, attempt in in_full:
        chunk = await session.get_one(MetricChunk, (job_id, window, attempt))
        found += rows_of(chunk)
    return found


def rows_of(chunk: MetricChunk) -> list[CommittedStep]:
    """The steps of the chunk whose times are readable."""
    found: list[CommittedStep] = []
    for step, values in chunk.rows.items():
        at, step_time_s = number(values[_AT]), number(values[_STEP_TIME])
        if at is not None and step_time_s is not None:
            found.append(CommittedStep(chunk.attempt, int(step), at, step_time_s))
    return found


async def _outages(session: AsyncSession, job_id: str) -> list[Outage]:
    """The incidents that ended an attempt; other incidents cost no time."""
    outages: list[Outage] = []
    for row in await queries.INCIDENTS.all(session, job=job_id):
        incident = read_incident(row.number, row.data)
        if incident.attempts_lost:
            phases_s = {phase: number(stored_s) for phase, stored_s in incident.phases_s.items()}
            outages.append(
                Outage(
                    signalled_at=number(incident.signalled_at) or row.opened_at,
                    closed_at=row.closed_at,
                    phases_s={name: taken for name, taken in phases_s.items() if taken is not None},
                    incident=row.number,
                )
            )
    return outages
