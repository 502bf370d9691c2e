"""Builds views from rows. The functions read and convert; they make no decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import BigInteger, BindParameter, Integer, bindparam, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model import program_levels
from holdfast_service.job_model.events.codec import read_incident
from holdfast_service.job_model.goodput import Goodput
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.log_levels import level_of
from holdfast_service.job_model.world_history import FormedWorld, mesh_changes
from holdfast_service.policy.decision_ladder import Budget
from holdfast_service.store import job_nodes
from holdfast_service.store.json_safe import number
from holdfast_service.store.models import (
    AttemptMember,
    AttemptRow,
    Checkpoint,
    Event,
    IncidentRow,
    JobRecord,
)
from holdfast_service.store.statement import JOB, Statement
from holdfast_service.views.attempts import (
    AttemptView,
    MemberView,
    RestoreView,
)
from holdfast_service.views.checkpoints import CheckpointView
from holdfast_service.views.event_text import event_text, event_until
from holdfast_service.views.goodput import GoodputView
from holdfast_service.views.history import EventView, LogLineView
from holdfast_service.views.incident_facts import has_all_rows
from holdfast_service.views.incident_text import incident_text, incident_title
from holdfast_service.views.incidents import (
    BudgetView,
    IncidentView,
    MeshChangeView,
)
from holdfast_service.views.jobs import (
    GuardsView,
    IntervalView,
    JobView,
    NextLevelView,
    OriginView,
    OutcomeView,
    ProgressView,
    StragglerView,
    WaitingView,
)
from holdfast_service.views.nodes import UnwellNodeView
from holdfast_service.views.sources import data_read
from holdfast_service.wording import device_time
from holdfast_workers.checkpoint.marks import Marks

_AFTER: BindParameter[int] = bindparam("after", type_=BigInteger)
_MOST: BindParameter[int] = bindparam("most", type_=Integer)
_MEMBERS = Statement(
    select(AttemptMember)
    .where(
        AttemptMember.job_id == JOB,
        AttemptMember.attempt.between(bindparam("first"), bindparam("last")),
    )
    .order_by(AttemptMember.rank)
)
_ATTEMPTS = Statement(
    select(AttemptRow)
    .where(AttemptRow.job_id == JOB, AttemptRow.number > _AFTER)
    .order_by(AttemptRow.number)
    .limit(_MOST)
)
_NEWEST_ATTEMPT = Statement(
    select(AttemptRow).where(AttemptRow.job_id == JOB).order_by(AttemptRow.number.desc()).limit(1)
)
INCIDENTS = Statement(
    select(IncidentRow).where(IncidentRow.job_id == JOB).order_by(IncidentRow.number)
)
_INCIDENTS_AFTER = Statement(
    select(IncidentRow)
    .where(IncidentRow.job_id == JOB, IncidentRow.number > _AFTER)
    .order_by(IncidentRow.number)
    .limit(_MOST)
)
_EVENTS = Statement(
    select(Event).where(Event.job_id == JOB, Event.seq > _AFTER).order_by(Event.seq).limit(_MOST)
)


async def job_view(session: AsyncSession, job: JobRecord) -> JobView:
    unwell = await job_nodes.unwell_nodes(session, [job])
    return _job_view(job, unwell.get(job.id, ()))


def _job_view(job: JobRecord, unwell: tuple[UnwellNodeView, ...]) -> JobView:
    state = State(job.state)
    outcome = None
    if state.terminal:
        outcome = OutcomeView(
            code=job.outcome_code or state.lower(),
            message=job.outcome_message or "",
            traceback=job.outcome_traceback,
        )
    return JobView.from_attributes(
        job,
        origin=OriginView.model_validate(job.origin) if job.origin else None,
        progress=ProgressView.from_attributes(job, steps=job.steps or None),
        reads=data_read(job.spec, job.step or 0, job.guards.get("ledger", ())),
        **_level_fields(job),
        outcome=outcome,
        guards=GuardsView.model_validate(job.guards),
        stragglers=_stragglers(job) if state.on_cluster else (),
        unwell_nodes=unwell,
        intervals={tier: IntervalView(**fields) for tier, fields in job.intervals.items()},
        waiting=WaitingView(**job.waiting) if job.waiting and not state.terminal else None,
        released=job.cleaned,
    )


def _level_fields(job: JobRecord) -> dict[str, Any]:
    kind = program_levels.brings(job.spec)
    level = program_levels.level_of(kind, job.attempt, job.program)
    fields: dict[str, Any] = {"brings": kind, "level": level}
    if not kind.is_program or level is None:
        return {**fields, "integration": None, "gives": None, "next_level": None}
    following = program_levels.next_level(kind, level, shows_steps=job.step is not None)
    return {
        **fields,
        "integration": (job.program or {}).get("integration") or None,
        "gives": program_levels.GIVES[level],
        "next_level": NextLevelView.from_attributes(following) if following else None,
    }


def _stragglers(job: JobRecord) -> tuple[StragglerView, ...]:
    by_rank = sorted(job.slow.items(), key=lambda item: int(item[0]))
    return tuple(StragglerView(**straggler) for _, straggler in by_rank)


async def newest_attempt(session: AsyncSession, job_id: str) -> AttemptRow | None:
    """The job's newest attempt; None: none has formed yet."""
    return await _NEWEST_ATTEMPT.first(session, job=job_id)


async def attempt_views(
    session: AsyncSession, job_id: str, after: int, limit: int
) -> list[AttemptView]:
    attempts = await _ATTEMPTS.all(session, job=job_id, after=after, most=limit)
    members: dict[int, list[MemberView]] = {}
    if attempts:
        first, last = attempts[0].number, attempts[-1].number
        for row in await _MEMBERS.all(session, job=job_id, first=first, last=last):
            members.setdefault(row.attempt, []).append(MemberView.from_attributes(row))
    return [_attempt_view(attempt, members.get(attempt.number, [])) for attempt in attempts]


async def incident_views(
    session: AsyncSession,
    job: JobRecord,
    after: int,
    limit: int,
    lost: Mapping[int, float],
    formed: Sequence[FormedWorld],
) -> list[IncidentView]:
    """The job's incidents. `lost`: incident number → device-seconds that the incident cost.
    `formed`: the worlds of all attempts."""
    incidents = await _INCIDENTS_AFTER.all(session, job=job.id, after=after, most=limit)
    changes = mesh_changes(formed)
    return [
        _incident_view(
            job,
            incident,
            lost=lost.get(incident.number, 0.0),
            mesh_change=mesh_change_view(changes.get(incident.number)),
        )
        for incident in incidents
    ]


def mesh_change_view(change: tuple[FormedWorld, FormedWorld] | None) -> MeshChangeView | None:
    if change is None:
        return None
    before, after = change
    return MeshChangeView(
        before=dict(before.mesh),
        after=dict(after.mesh),
        ranks_before=before.world_size,
        ranks_after=after.world_size,
    )


def goodput_view(job: JobRecord, goodput: Goodput) -> GoodputView:
    lost = goodput.lost_device_s
    known = program_levels.has_goodput(job.spec, job.cursor_attempt)
    ratio = goodput.effective_training_time_ratio
    return GoodputView.from_attributes(
        goodput,
        goodput=goodput.goodput if known else None,
        effective_training_time_ratio=ratio if known else None,
        by_kind_s=dict(goodput.by_kind_s),
        device_seconds_held=goodput.held_device_s,
        device_seconds_by_kind=dict(goodput.by_kind_device_s),
        device_seconds_lost=sum(lost.values()),
        device_seconds_lost_by_incident={
            incident: seconds for incident, seconds in lost.items() if incident is not None
        },
        device_seconds_lost_otherwise=lost.get(None, 0.0),
        final=State(job.state).terminal,
    )


async def event_views(
    session: AsyncSession, job_id: str, after: int, limit: int
) -> list[EventView]:
    events = await _EVENTS.all(session, job=job_id, after=after, most=limit)
    return [
        EventView.from_attributes(
            event,
            text=event_text(event.kind, event.data),
            until=event_until(event.kind, event.data),
        )
        for event in events
    ]


async def checkpoints(session: AsyncSession, job_id: str) -> list[Checkpoint]:
    """The job's remote checkpoints, newest first, including deleted and bad ones."""
    found = await session.scalars(
        select(Checkpoint)
        .where(Checkpoint.job_id == job_id)
        .order_by(Checkpoint.step.desc(), Checkpoint.attempt.desc())
    )
    return list(found)


def checkpoint_view(row: Checkpoint, marks: Marks | None, *, best: bool) -> CheckpointView:
    """`marks`: the checkpoint's marks on the storage; None: not known."""
    return CheckpointView.from_attributes(
        row,
        metrics=finite_metrics(row.metrics),
        best=best,
        pinned=None if marks is None else marks.pinned,
        needed_by=None if marks is None else marks.needed_by,
    )


def finite_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """The stored metrics that are finite numbers."""
    known = {name: number(value) for name, value in metrics.items()}
    return {name: value for name, value in known.items() if value is not None}


def log_line_view(line: int, stored: list[Any]) -> LogLineView:
    """The view of a line in the form that `series.store_logs` stores."""
    at, rank, attempt, agent, worker, stream, content = stored
    return LogLineView(
        line=line,
        at=at,
        rank=rank,
        attempt=attempt,
        agent=agent,
        worker=worker,
        stream=stream,
        text=content,
        level=level_of(content),
    )


def _attempt_view(attempt: AttemptRow, members: list[MemberView]) -> AttemptView:
    return AttemptView.from_attributes(
        attempt,
        members=tuple(members),
        restore=RestoreView.model_validate(attempt.restore),
        memory_protection=attempt.memory or None,
    )


def _incident_view(
    job: JobRecord, row: IncidentRow, *, lost: float, mesh_change: MeshChangeView | None
) -> IncidentView:
    incident = read_incident(row.number, row.data)
    is_final = State(job.state).terminal or (
        row.closed_at is not None and has_all_rows(incident, job.cursor_attempt)
    )
    final = lost if is_final else None
    view = IncidentView.from_attributes(
        incident,
        number=row.number,
        title="",
        text=(),
        budget=_budget_view(incident.budget),
        mesh_change=mesh_change,
        device_seconds_lost=final,
        cost=device_time(final) if final else "",
        tiers={str(rank): tier for rank, tier in incident.tiers.items()},
        phases_s={phase: number(seconds) for phase, seconds in incident.phases_s.items()},
        signalled_at=number(incident.signalled_at),
        opened_at=row.opened_at,
        closed_at=row.closed_at,
    )
    return view.model_copy(
        update={"title": incident_title(view), "text": tuple(incident_text(view))}
    )


def _budget_view(budget: Budget | None) -> BudgetView | None:
    if budget is None:
        return None
    return BudgetView(**budget.__dict__, failures_left=budget.failures_left)
