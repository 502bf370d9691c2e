"""Applies one supervisor event to the tables: attempts, incidents, checkpoints, the job.

The caller (`store/projection.py`) stores the event itself and handles events that cannot be read.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, select, update

from holdfast_service.job_model.events.attempts import (
    AttemptEndedEvent,
    AttemptFormingEvent,
    AttemptRunningEvent,
    MemoryPlacedEvent,
    ProgramAttachedEvent,
    ProgramResumedEvent,
    SeatedRank,
)
from holdfast_service.job_model.events.checkpoints import (
    CheckpointBadEvent,
    CheckpointDeletedEvent,
    CheckpointIntervalEvent,
    CheckpointSavedEvent,
)
from holdfast_service.job_model.events.codec import AnyEvent, read_incident
from holdfast_service.job_model.events.health import (
    GuardTrippedEvent,
    NodeHealthEvent,
    StragglerEvent,
)
from holdfast_service.job_model.events.incidents import (
    IncidentClosedEvent,
    IncidentEvent,
    IncidentRecord,
    with_late_evidence,
)
from holdfast_service.job_model.events.progress import (
    EndedEvent,
    JobAwayEvent,
    PhaseEvent,
    StopUndoneEvent,
    WaitingEvent,
)
from holdfast_service.job_model.lifecycle import Desired, State, may
from holdfast_service.job_model.supervisor_protocol import SupervisorEvent
from holdfast_service.policy.causes import Cause
from holdfast_service.policy.quarantine import QuarantineRules, node_name
from holdfast_service.store import nodes, series
from holdfast_service.store.json_safe import text
from holdfast_service.store.models import AttemptMember, AttemptRow, Checkpoint, IncidentRow
from holdfast_service.store.statement import Upsert
from holdfast_service.store.transaction import Effect, JobTransaction
from holdfast_workers.protocol.codec import as_json

_MAX_RECENT_TRIPS = 20  # in the job's row; the events hold all trips
_PUT_MEMBERS = Upsert(AttemptMember)
_OUTCOMES = (State.SUCCEEDED, State.FAILED, State.CANCELLED)


async def apply_event(  # noqa: PLR0912  (one per kind)
    tx: JobTransaction, event: SupervisorEvent, content: AnyEvent, rules: QuarantineRules
) -> None:
    """Update the tables for `event`, which says `content`; other kinds are only stored.

    Raises StatementError for values that the database refuses; the caller then rolls the
    transaction back to the savepoint before the event.
    """
    at = event.at
    match content:
        case PhaseEvent():
            tx.enter(content.phase, at)
        case AttemptFormingEvent():
            await _attempt_forming(tx, content, at)
        case AttemptRunningEvent():
            await _attempt_running(tx, content, at)
        case AttemptEndedEvent():
            attempt = await _get_or_add_attempt(tx, content.attempt, at)
            attempt.state = "ended"
            attempt.ended_at = at
            attempt.reason = text(content.reason)
            attempt.last_step = content.last_step
            if content.attempt == tx.job.cursor_attempt:  # a row may show a later one
                attempt.last_step = max(content.last_step or 0, tx.job.cursor_step)
        case ProgramResumedEvent(restored_step=restored, first_step=first):
            attempt = await _get_or_add_attempt(tx, content.attempt, at)
            if restored != attempt.restore.get("step"):  # it has not loaded what it was offered
                unlike = {"attempt": 0, "tiers": {}, "sources": {}}
                attempt.restore = {**attempt.restore, **unlike, "step": restored}
            attempt.first_step = first
            if restored is not None and content.steps_lost is not None:
                await _raise_step_before(tx, content.attempt, restored)
        case MemoryPlacedEvent():
            attempt = await _get_or_add_attempt(tx, content.attempt, at)
            attempt.memory = as_json(content.protection)
        case IncidentEvent():
            await _incident(tx, content, event)
            await nodes.record_incident(tx, content.record, rules)
        case NodeHealthEvent():
            await nodes.record_health(tx, content, rules)
        case CheckpointSavedEvent():
            await _checkpoint_saved(tx, content, at)
        case CheckpointDeletedEvent() | CheckpointBadEvent():
            await _checkpoint_gone(tx, content, at)
        case EndedEvent():
            await _end_job(tx, content, at)
        case _:
            await _apply_to_job(tx, content, at)


async def _apply_to_job(tx: JobTransaction, content: AnyEvent, at: float) -> None:
    """Apply an event that changes only the job's row."""
    match content:
        case WaitingEvent(resource=resource, reason=reason, until=until):
            tx.job.waiting = {
                "resource": text(resource),
                "reason": text(reason or f"waiting for {resource}"),
                "since": at,
                "until": until,
            }
        case CheckpointIntervalEvent():
            interval = {**as_json(content.choice), "before": content.before}
            tier = interval.pop("tier")
            tx.job.intervals = {**tx.job.intervals, tier: interval}
        case ProgramAttachedEvent():
            tx.job.program = as_json(content)
        case GuardTrippedEvent(trip=trip):
            _save_guard_trip(tx, content, at)
            if trip.back_to is not None:
                await series.forget_digests(tx.session, tx.job.id, trip.back_to)
        case StragglerEvent():
            _save_straggler(tx, content, at)
        case JobAwayEvent():
            tx.record_absence(content, at)
        case StopUndoneEvent(reason=reason) if tx.state is State.PAUSING:
            if tx.job.desired == Desired.PAUSED:
                tx.job.desired = Desired.RUNNING
            await tx.forget_intents(Effect.PAUSE)
            tx.transition(State.RUNNING, reason=text(reason), at=at)


def _save_guard_trip(tx: JobTransaction, event: GuardTrippedEvent, at: float) -> None:
    """Store the current ledger, the number of trips, and the most recent trips."""
    before = tx.job.guards
    trip = {**as_json(event.trip), "attempt": event.attempt, "at": at}
    tx.job.guards = {
        "trips": before.get("trips", 0) + 1,
        "ledger": [list(window) for window in event.ledger],
        "recent": [*before.get("recent", ()), trip][-_MAX_RECENT_TRIPS:],
    }


def _save_straggler(tx: JobTransaction, event: StragglerEvent, at: float) -> None:
    """Update the ranks that are slow at present."""
    rank = str(event.rank)
    slow = {other: entry for other, entry in tx.job.slow.items() if other != rank}
    if event.state == "slow":
        slow[rank] = {
            "rank": event.rank,
            "agent": text(event.agent),
            "node": node_name(text(event.node_id), text(event.host)) if event.node_id else "",
            "factor": event.factor,
            "since_step": event.since_step,
            "since": event.since or at,
        }
    tx.job.slow = slow


async def _end_job(tx: JobTransaction, event: EndedEvent, at: float) -> None:
    """End the job. A supervisor that has ended always ends its job, whatever the outcome field."""
    if tx.state.terminal:
        return
    if event.step is not None:
        tx.job.step = event.step
    if event.outcome == State.PAUSED and tx.state is State.PAUSING:
        await tx.record_intent(Effect.RELEASE)  # PAUSED follows once the job has left the cluster
        return
    given_back = event.outcome == State.PAUSED and event.code == "no_nodes"
    if given_back and may(tx.state, State.PAUSING):
        tx.transition(State.PAUSING, reason=text(event.message), at=at)
        await tx.record_intent(Effect.RELEASE)  # QUEUED follows once it has left the cluster
        return
    outcome = next((state for state in _OUTCOMES if state == event.outcome), State.FAILED)
    if event.outcome == State.PAUSED:
        outcome = State.CANCELLED  # the user cancelled while the job was pausing
    code = event.code or outcome.lower()
    tx.end(outcome, code, event.message, event.traceback or None, at=at)


async def _get_or_add_attempt(tx: JobTransaction, number_: int, at: float) -> AttemptRow:
    attempt = await tx.session.get(AttemptRow, (tx.job.id, number_))
    if attempt is None:
        attempt = AttemptRow(
            job_id=tx.job.id,
            number=number_,
            state="forming",
            mesh={},
            world_size=0,
            standbys=[],
            restore={},
            joined={},
            forming_at=at,
        )
        tx.session.add(attempt)
    return attempt


async def _attempt_forming(tx: JobTransaction, event: AttemptFormingEvent, at: float) -> None:
    last = await tx.session.scalar(
        select(AttemptRow)
        .where(AttemptRow.job_id == tx.job.id)
        .order_by(AttemptRow.number.desc())
        .limit(1)
    )
    back_to = event.restore.step
    if last is not None and (last.mesh != event.mesh or back_to < (last.restore.get("step") or 0)):
        await series.forget_digests(tx.session, tx.job.id, back_to)
    attempt = await _get_or_add_attempt(tx, event.attempt, at)
    attempt.mesh = dict(event.mesh)
    attempt.world_size = event.world_size
    attempt.standbys = [as_json(standby) for standby in event.standbys]
    attempt.restore = as_json(event.restore)
    if event.restore.is_own:  # its first step tells
        attempt.restore = {**attempt.restore, "step": None}
    attempt.cause_incident = event.cause_incident
    attempt.forming_at = at
    tx.job.attempt = max(tx.job.attempt, attempt.number)
    await _end_older_attempts(tx, attempt.number, at)
    if event.restore.attempt:
        await raise_last_step(tx, event.restore.attempt, event.restore.step)
    await _save_members(tx, attempt.number, event.members)
    agents = {str(member.rank): member.agent for member in event.members}
    tx.job.slow = {
        rank: entry for rank, entry in tx.job.slow.items() if agents.get(rank) == entry["agent"]
    }


async def _end_older_attempts(tx: JobTransaction, before: int, at: float) -> None:
    """End the attempts below `before` whose end was never reported: a job has a single world."""
    if before <= 1:
        return
    await tx.session.execute(
        update(AttemptRow)
        .where(
            AttemptRow.job_id == tx.job.id, AttemptRow.number < before, AttemptRow.state != "ended"
        )
        .values(state="ended", ended_at=at, reason="lost with the nodes it ran on")
    )


async def raise_last_step(tx: JobTransaction, attempt: int, step: int) -> None:
    """The attempt has made this step, as was known only after its end."""
    await tx.session.execute(
        update(AttemptRow)
        .where(
            AttemptRow.job_id == tx.job.id,
            AttemptRow.number == attempt,
            AttemptRow.state == "ended",
            func.coalesce(AttemptRow.last_step, -1) < step,
        )
        .values(last_step=step)
    )


async def _raise_step_before(tx: JobTransaction, attempt: int, step: int) -> None:
    """A program goes on from this step: an attempt before has made it. The newest that made any
    step is meant."""
    before = await tx.session.scalar(
        select(func.max(AttemptRow.number)).where(
            AttemptRow.job_id == tx.job.id,
            AttemptRow.number < attempt,
            AttemptRow.last_step.is_not(None),
        )
    )
    if before is not None:
        await raise_last_step(tx, before, step)


async def _attempt_running(tx: JobTransaction, event: AttemptRunningEvent, at: float) -> None:
    attempt = await _get_or_add_attempt(tx, event.attempt, at)
    attempt.state = "running"
    attempt.running_at = at
    attempt.joined = {str(rank): as_json(times) for rank, times in event.joined.items()}
    attempt.first_step = event.first_step
    tx.job.waiting = None
    await _save_members(tx, attempt.number, event.members)


async def _save_members(tx: JobTransaction, attempt: int, members: tuple[SeatedRank, ...]) -> None:
    if not members:
        return
    # A later entry for the same rank (with its final pid) replaces the earlier one.
    rows = [
        {
            "job_id": tx.job.id,
            "attempt": attempt,
            "rank": seated.rank,
            "worker": text(seated.worker or ""),
            "agent": text(seated.agent),
            "node_id": text(seated.node_id),
            "host": text(seated.host),
            "pid": seated.pid,
            "role": text(seated.role),
        }
        for seated in members
    ]
    await _PUT_MEMBERS.rows(tx.session, rows)


async def _incident(tx: JobTransaction, content: IncidentEvent, event: SupervisorEvent) -> None:
    record = content.record
    incident = await tx.session.get(IncidentRow, (tx.job.id, record.incident))
    if incident is not None and incident.closed_at is not None:
        incident.data = {**incident.data, **_late_evidence(incident, record)}
        return
    if incident is None:
        await _close_forgotten(tx, record, event.at)
        incident = IncidentRow(
            job_id=tx.job.id,
            number=record.incident,
            opened_at=record.opened_at or event.at,
            data={},
        )
        tx.session.add(incident)
    # As received: a newer supervisor may send fields that this version does not know.
    known = {name: value for name, value in event.data.items() if value is not None}
    incident.data = {**incident.data, **known}
    if isinstance(content, IncidentClosedEvent):
        incident.closed_at = record.closed_at or event.at
    tx.job.incidents = max(tx.job.incidents, incident.number)


def _late_evidence(row: IncidentRow, told: IncidentRecord) -> dict[str, Any]:
    """What a report may still add to a closed incident. Raises ValueError: it says anything else,
    so it is stored as an event that could not be applied."""
    closed = read_incident(row.number, row.data)
    amended = with_late_evidence(closed, told)
    if amended is None:
        raise ValueError(
            f"incident {row.number} is closed, and its record does not change: the report is of "
            "another fault"
        )
    names = ("cause", "causes", "lost", "evidence")
    return {name: value for name, value in as_json(amended).items() if name in names}


async def _close_forgotten(tx: JobTransaction, opened: IncidentRecord, at: float) -> None:
    """At most one incident is open, and beside it one of the remote tier: an older one that is open
    was lost with the supervisor that had it."""
    is_outage = opened.cause == Cause.REMOTE_UNAVAILABLE
    why = "its end is not known: it was lost with the supervisor that had it open"
    for row in await _open_incidents(tx):
        is_older = row.number < opened.incident
        if is_older and (row.data.get("cause") == Cause.REMOTE_UNAVAILABLE) is is_outage:
            _close_row(row, at, why)


async def close_incidents_of_ended_job(tx: JobTransaction) -> None:
    """Close what its supervisor could not, as it was lost."""
    code = tx.job.outcome_code or ""
    for row in await _open_incidents(tx):
        _close_row(row, tx.job.ended_at or tx.now, f"the job ended: {code}", end_code=code)


async def close_incidents_of_lost_job(tx: JobTransaction, at: float) -> None:
    """Nothing of the job is left since `at`: its next supervisor knows none of them."""
    why = "everything of the job on the cluster was lost, and the job was started again"
    for row in await _open_incidents(tx):
        _close_row(row, max(at, row.opened_at), why)


async def _open_incidents(tx: JobTransaction) -> list[IncidentRow]:
    found = select(IncidentRow).where(
        IncidentRow.job_id == tx.job.id, IncidentRow.closed_at.is_(None)
    )
    return list(await tx.session.scalars(found))


def _close_row(row: IncidentRow, at: float, resolution: str, end_code: str = "") -> None:
    row.closed_at = at
    end = {"closed_at": at, "resolution": resolution, "end_code": end_code}
    row.data = {**row.data, **end}


async def _checkpoint_saved(tx: JobTransaction, event: CheckpointSavedEvent, at: float) -> None:
    known = await tx.session.get(Checkpoint, (tx.job.id, text(event.uri)))
    if known is not None and known.deleted_at is None:
        return  # a supervisor that starts reports every checkpoint that it finds
    await _record_save_duration(tx, event, at)
    await tx.session.merge(
        Checkpoint(
            job_id=tx.job.id,
            uri=text(event.uri),
            step=event.step,
            attempt=event.attempt,
            tier=text(event.tier),
            nbytes=event.nbytes,
            mesh=dict(event.mesh),
            metrics=dict(event.metrics),
            saved_at=at,
            verified_at=None,
            deleted_at=None,
            deleted_why=None,
            bad=None,
        )
    )


async def _record_save_duration(tx: JobTransaction, event: CheckpointSavedEvent, at: float) -> None:
    """Record the time from the end of the step until its checkpoint is durable."""
    step_ended_at = await series.row_time(tx.session, tx.job.id, event.step, event.attempt)
    if step_ended_at is not None and at >= step_ended_at:
        tx.measured(text(event.tier), "save", at - step_ended_at)


async def _checkpoint_gone(
    tx: JobTransaction, event: CheckpointDeletedEvent | CheckpointBadEvent, at: float
) -> None:
    if isinstance(event, CheckpointBadEvent) and event.corrupt is not None:
        await series.forget_digests(tx.session, tx.job.id, event.corrupt.step - 1)
    checkpoint = await tx.session.get(Checkpoint, (tx.job.id, text(event.uri)))
    if checkpoint is None:
        return  # for example an incomplete leftover that was never announced; the event is stored
    if isinstance(event, CheckpointBadEvent):
        checkpoint.bad = text(event.message or "failed verification")
    else:
        checkpoint.deleted_at = at
        checkpoint.deleted_why = text(event.why)
