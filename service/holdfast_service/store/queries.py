"""Rows to views. Each function reads; none decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Integer, bindparam, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.goodput import Goodput
from holdfast_service.job_model.lifecycle import Desired, State
from holdfast_service.job_model.log_filters import level_of
from holdfast_service.store import job_nodes
from holdfast_service.store.json_safe import number
from holdfast_service.store.models import (
    Attempt,
    AttemptMember,
    Checkpoint,
    Event,
    Incident,
    Job,
)
from holdfast_service.store.statement import JOB, Statement
from holdfast_service.views.goodput import GoodputView
from holdfast_service.views.jobs import (
    AttemptView,
    BudgetView,
    CheckpointView,
    EventView,
    GuardsView,
    IncidentView,
    IntervalView,
    JobView,
    LogLineView,
    MemberView,
    MemoryProtectionView,
    OriginView,
    OutcomeView,
    ProgressView,
    RefusedView,
    StragglerView,
    UnwellNodeView,
    WaitingView,
)
from holdfast_workers.checkpoint.marks import Marks

_MEMBERS = Statement(
    select(AttemptMember).where(AttemptMember.job_id == JOB).order_by(AttemptMember.rank)
)
_ATTEMPTS = Statement(select(Attempt).where(Attempt.job_id == JOB).order_by(Attempt.number))
INCIDENTS = Statement(select(Incident).where(Incident.job_id == JOB).order_by(Incident.number))
_EVENTS = Statement(
    select(Event)
    .where(Event.job_id == JOB, Event.seq > bindparam("after"))
    .order_by(Event.seq)
    .limit(bindparam("most", type_=Integer))
)


async def job_view(session: AsyncSession, job: Job) -> JobView:
    return (await job_views(session, [job]))[0]


async def job_views(session: AsyncSession, jobs: Sequence[Job]) -> list[JobView]:
    unwell = await job_nodes.unwell(session, jobs)
    return [_job_view(job, unwell.get(job.id, ())) for job in jobs]


def _job_view(job: Job, unwell: tuple[UnwellNodeView, ...]) -> JobView:
    state = State(job.state)
    outcome = None
    if state.terminal:
        outcome = OutcomeView(
            code=job.outcome_code or state.lower(),
            message=job.outcome_message or "",
            traceback=job.outcome_traceback,
        )
    return JobView(
        id=job.id,
        name=job.name,
        state=state,
        desired=Desired(job.desired),
        spec=job.spec,
        origin=OriginView.model_validate(job.origin) if job.origin else None,
        progress=ProgressView(
            step=job.step,
            steps=job.steps,
            attempt=job.attempt,
            loss=job.loss,
            tokens_per_second=job.tokens_per_second,
            incidents=job.incidents,
        ),
        outcome=outcome,
        guards=GuardsView.model_validate(job.guards),
        stragglers=_stragglers(job) if state.on_cluster else (),
        unwell_nodes=unwell,
        intervals={tier: IntervalView(**told) for tier, told in job.intervals.items()},
        waiting=WaitingView(**job.waiting) if job.waiting and not state.terminal else None,
        created_at=job.created_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        released=job.cleaned,
        event_seq=job.event_seq,
    )


def _stragglers(job: Job) -> tuple[StragglerView, ...]:
    told = [one for _, one in sorted(job.slow.items(), key=lambda item: int(item[0]))]
    return tuple(
        StragglerView(
            rank=one["rank"],
            agent=one["agent"],
            node=one["node"],
            factor=one["factor"],
            since_step=one["since_step"],
            since=one["since"],
        )
        for one in told
    )


async def attempt_views(session: AsyncSession, job_id: str) -> list[AttemptView]:
    members: dict[int, list[MemberView]] = {}
    for row in await _MEMBERS.all(session, job=job_id):
        members.setdefault(row.attempt, []).append(
            MemberView(
                rank=row.rank,
                worker=row.worker,
                agent=row.agent,
                node_id=row.node_id,
                host=row.host,
                pid=row.pid,
                role=row.role,
            )
        )
    attempts = await _ATTEMPTS.all(session, job=job_id)
    return [_attempt_view(attempt, members.get(attempt.number, [])) for attempt in attempts]


async def incident_views(
    session: AsyncSession, job_id: str, lost: Mapping[int, float]
) -> list[IncidentView]:
    """`lost`: incident → device-seconds that it cost, of those that cost any."""
    incidents = await INCIDENTS.all(session, job=job_id)
    return [_incident_view(incident, lost.get(incident.number, 0.0)) for incident in incidents]


def goodput_view(job: Job, told: Goodput, devices: int) -> GoodputView:
    lost_s = {one: seconds * devices for one, seconds in told.lost_s.items()}
    return GoodputView(
        held_s=told.held_s,
        by_kind_s=dict(told.by_kind_s),
        goodput=told.goodput,
        effective_training_time_ratio=told.effective_training_time_ratio,
        steps=told.steps,
        steps_replayed=told.steps_replayed,
        devices=devices,
        device_seconds_lost=sum(lost_s.values()),
        device_seconds_lost_by_incident={
            one: seconds for one, seconds in lost_s.items() if one is not None
        },
        device_seconds_lost_otherwise=lost_s.get(None, 0.0),
        final=State(job.state).terminal,
    )


async def event_views(
    session: AsyncSession, job_id: str, after: int, limit: int
) -> list[EventView]:
    events = await _EVENTS.all(session, job=job_id, after=after, most=limit)
    return [
        EventView(seq=event.seq, at=event.at, kind=event.kind, data=event.data) for event in events
    ]


async def checkpoints(session: AsyncSession, job_id: str) -> list[Checkpoint]:
    """Remote checkpoints, newest first, deleted and bad ones included."""
    found = await session.scalars(
        select(Checkpoint)
        .where(Checkpoint.job_id == job_id)
        .order_by(Checkpoint.step.desc(), Checkpoint.attempt.desc())
    )
    return list(found)


def checkpoint_view(row: Checkpoint, marks: Marks | None, *, best: bool) -> CheckpointView:
    """`marks` None: it is not known which it bears."""
    return CheckpointView(
        step=row.step,
        attempt=row.attempt,
        tier=row.tier,
        uri=row.uri,
        nbytes=row.nbytes,
        mesh=row.mesh,
        metrics=finite(row.metrics),
        saved_at=row.saved_at,
        verified_at=row.verified_at,
        deleted_at=row.deleted_at,
        deleted_why=row.deleted_why,
        bad=row.bad,
        best=best,
        pinned=None if marks is None else marks.pinned,
        needed_by=None if marks is None else marks.needed_by,
    )


def finite(metrics: dict[str, Any]) -> dict[str, float]:
    """The stored metrics that are numbers."""
    known = {name: number(value) for name, value in metrics.items()}
    return {name: value for name, value in known.items() if value is not None}


def log_line_view(line: int, stored: list[Any]) -> LogLineView:
    """A line as `series.store_logs` keeps it."""
    at, rank, attempt, agent, worker, stream, said = stored
    return LogLineView(
        line=line,
        at=at,
        rank=rank,
        attempt=attempt,
        agent=agent,
        worker=worker,
        stream=stream,
        text=said,
        level=level_of(said),
    )


def _attempt_view(attempt: Attempt, members: list[MemberView]) -> AttemptView:
    return AttemptView(
        number=attempt.number,
        state=attempt.state,
        mesh=attempt.mesh,
        world_size=attempt.world_size,
        members=tuple(members),
        standbys=tuple(attempt.standbys),
        restore=attempt.restore,
        cause_incident=attempt.cause_incident,
        joined=attempt.joined,
        memory_protection=MemoryProtectionView(**attempt.memory) if attempt.memory else None,
        first_step=attempt.first_step,
        last_step=attempt.last_step,
        forming_at=attempt.forming_at,
        running_at=attempt.running_at,
        ended_at=attempt.ended_at,
        reason=attempt.reason,
    )


def _incident_view(incident: Incident, lost: float) -> IncidentView:
    said = incident.data
    return IncidentView(
        number=incident.number,
        cause=str(said.get("cause") or "unknown"),
        causes=tuple(map(str, said.get("causes") or ())),
        attempt=said.get("attempt") or 0,
        lost=tuple(said.get("lost") or ()),
        evidence=tuple(said.get("evidence") or ()),
        suspects=tuple(said.get("suspects") or ()),
        stacks=tuple(said.get("stacks") or ()),
        decision=_words(said.get("decision")),
        reason=_words(said.get("reason")),
        refused=tuple(RefusedView(**one) for one in said.get("refused") or ()),
        budget=BudgetView(**said["budget"]) if said.get("budget") else None,
        attempts_lost=len([*(said.get("failures") or ()), *(said.get("preemptions") or ())]),
        restored_step=said.get("restored_step"),
        steps_lost=said.get("steps_lost"),
        device_seconds_lost=lost,
        tiers={str(rank): str(tier) for rank, tier in (said.get("tiers") or {}).items()},
        phases_s={
            str(phase): number(seconds) for phase, seconds in (said.get("phases_s") or {}).items()
        },
        signalled_at=number(said.get("signalled_at")),
        opened_at=incident.opened_at,
        closed_at=incident.closed_at,
        resolution=_words(said.get("resolution")),
    )


def _words(said: object) -> str | None:
    return None if said is None else str(said)
