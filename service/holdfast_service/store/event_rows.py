"""Applies one supervisor event to the tables: attempts, incidents, checkpoints, the job.

The caller (`store/projection.py`) stores the event itself and handles events that cannot be read.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import select, update

from holdfast_service.job_model.lifecycle import Desired, State, state_after_report
from holdfast_service.job_model.supervisor_protocol import EventKind, Phase, SupervisorEvent
from holdfast_service.policy.quarantine import QuarantineRules, node_name
from holdfast_service.store import nodes, series
from holdfast_service.store.json_safe import text
from holdfast_service.store.models import AttemptMember, AttemptRow, Checkpoint, IncidentRow
from holdfast_service.store.transaction import Effect, JobTransaction

_MAX_RECENT_TRIPS = 20  # in the job's row; the events hold all trips
_OUTCOMES = (State.SUCCEEDED, State.FAILED, State.CANCELLED)


async def apply_event(tx: JobTransaction, event: SupervisorEvent, rules: QuarantineRules) -> None:
    """Update the tables for `event`.

    Raises KeyError, TypeError, ValueError, AttributeError or StatementError for a malformed event;
    the caller then rolls the transaction back to the savepoint before the event.
    """
    fields = event.data
    match event.kind:
        case EventKind.PHASE:
            apply_phase(tx, Phase(fields["phase"]), at=event.at)
        case EventKind.ATTEMPT_FORMING:
            await _attempt_forming(tx, fields, event.at)
        case EventKind.ATTEMPT_RUNNING:
            await _attempt_running(tx, fields, event.at)
        case EventKind.ATTEMPT_ENDED:
            attempt = await _get_or_add_attempt(tx, _integer(fields["attempt"]), event.at)
            attempt.state = "ended"
            attempt.ended_at = event.at
            attempt.reason = text(fields.get("reason") or "")
            attempt.last_step = _integer_or_none(fields.get("last_step"))
        case kind if kind in nodes.NODE_EVENTS:
            await _node_event(tx, event, rules)
        case EventKind.CHECKPOINT_SAVED:
            await _checkpoint_saved(tx, fields, event.at)
        case EventKind.CHECKPOINT_DELETED | EventKind.CHECKPOINT_BAD:
            await _checkpoint_gone(tx, fields, event)
        case EventKind.WAITING:
            tx.job.waiting = {
                "resource": text(fields["resource"]),
                "reason": text(fields.get("reason") or f"waiting for {fields['resource']}"),
                "since": event.at,
                "until": fields.get("until"),
            }
        case EventKind.MEMORY_PLACED:
            attempt = await _get_or_add_attempt(tx, _integer(fields["attempt"]), event.at)
            attempt.memory = {
                name: fields[name] for name in ("copies", "partners", "recoverable", "unprotected")
            }
        case (
            EventKind.INITIALISED_FROM
            | EventKind.STANDBY
            | EventKind.JOB_STOPPING
            | EventKind.FAULT_FAILED
            | EventKind.STALLED
            | EventKind.NODE_DRAINING
        ):
            pass  # only the event itself is stored
        case EventKind.CHECKPOINT_INTERVAL | EventKind.GUARD_TRIPPED | EventKind.STRAGGLER:
            _JOB_COLUMN_EVENTS[event.kind](tx, fields, event.at)
        case EventKind.STOP_UNDONE | EventKind.ENDED:
            apply = _ended if event.kind is EventKind.ENDED else _pause_undone
            await apply(tx, fields, event.at)


def apply_phase(tx: JobTransaction, phase: Phase, at: float | None = None) -> None:
    """Move the job to the state that corresponds to the supervisor's phase, if that is allowed."""
    new = state_after_report(tx.state, phase)
    if new is not None:
        tx.transition(new, at=at)


def _save_interval(tx: JobTransaction, fields: dict[str, Any], at: float) -> None:
    del at
    interval = {key: value for key, value in fields.items() if key != "tier"}
    tx.job.intervals = {**tx.job.intervals, text(fields["tier"]): interval}


def _save_guard_trip(tx: JobTransaction, fields: dict[str, Any], at: float) -> None:
    """Store the current ledger, the number of trips, and the most recent trips."""
    before = tx.job.guards
    trip = {key: value for key, value in fields.items() if key != "ledger"}
    tx.job.guards = {
        "trips": before.get("trips", 0) + 1,
        "ledger": [[_integer(first), _integer(end)] for first, end in fields["ledger"]],
        "recent": [*before.get("recent", ()), {**trip, "at": at}][-_MAX_RECENT_TRIPS:],
    }


def _save_straggler(tx: JobTransaction, fields: dict[str, Any], at: float) -> None:
    """Update the ranks that are slow at present."""
    rank = str(_integer(fields["rank"]))
    slow = {other: entry for other, entry in tx.job.slow.items() if other != rank}
    if fields["state"] == "slow":
        node = node_name(text(fields["node_id"]), text(fields["host"])) if fields["node_id"] else ""
        slow[rank] = {
            "rank": _integer(fields["rank"]),
            "agent": text(fields["agent"]),
            "node": node,
            "factor": float(fields["factor"]),
            "since_step": _integer(fields["since_step"]),
            "since": float(fields.get("since") or at),
        }
    tx.job.slow = slow


_JOB_COLUMN_EVENTS = {
    EventKind.CHECKPOINT_INTERVAL: _save_interval,
    EventKind.GUARD_TRIPPED: _save_guard_trip,
    EventKind.STRAGGLER: _save_straggler,
}


async def _pause_undone(tx: JobTransaction, fields: dict[str, Any], at: float) -> None:
    if tx.state is not State.PAUSING:
        return
    if tx.job.desired == Desired.PAUSED:
        tx.job.desired = Desired.RUNNING
    await tx.forget_intents(Effect.PAUSE)
    tx.transition(State.RUNNING, reason=text(str(fields.get("reason") or "")), at=at)


async def _ended(tx: JobTransaction, fields: dict[str, Any], at: float) -> None:
    """End the job. A supervisor that has ended always ends its job, whatever the outcome field."""
    if tx.state.terminal:
        return
    if isinstance(fields.get("step"), int):
        tx.job.step = fields["step"]
    if fields.get("outcome") == State.PAUSED and tx.state is State.PAUSING:
        await tx.record_intent(Effect.RELEASE)  # PAUSED follows once the job has left the cluster
        return
    outcome = next((state for state in _OUTCOMES if state == fields.get("outcome")), State.FAILED)
    if fields.get("outcome") == State.PAUSED:
        outcome = State.CANCELLED  # the user cancelled while the job was pausing
    traceback = fields.get("traceback")
    tx.end(
        outcome,
        str(fields.get("code") or outcome.lower()),
        str(fields.get("message") or ""),
        None if not traceback else str(traceback),
        at=at,
    )


async def _get_or_add_attempt(tx: JobTransaction, number_: int, at: float) -> AttemptRow:
    attempt = await tx.session.get(AttemptRow, (tx.job.id, number_))
    if attempt is None:
        tx.members_by_attempt[number_] = {}
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


async def _attempt_forming(tx: JobTransaction, fields: dict[str, Any], at: float) -> None:
    attempt = await _get_or_add_attempt(tx, _integer(fields["attempt"]), at)
    attempt.mesh = dict(fields["mesh"])
    attempt.world_size = _integer(fields["world_size"])
    attempt.standbys = list(fields.get("standbys") or ())
    attempt.restore = dict(fields.get("restore") or {})
    attempt.cause_incident = _integer_or_none(fields.get("cause_incident"))
    attempt.forming_at = at
    tx.job.attempt = max(tx.job.attempt, attempt.number)
    await _end_older_attempts(tx, attempt.number, at)
    await _save_members(tx, attempt.number, fields["members"])
    agents = {str(member["rank"]): member.get("agent") for member in fields["members"]}
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


async def _attempt_running(tx: JobTransaction, fields: dict[str, Any], at: float) -> None:
    attempt = await _get_or_add_attempt(tx, _integer(fields["attempt"]), at)
    attempt.state = "running"
    attempt.running_at = at
    attempt.joined = {str(rank): phases for rank, phases in (fields.get("joined") or {}).items()}
    attempt.first_step = _integer_or_none(fields.get("first_step"))
    tx.clear_wait(*([tx.job.waiting["resource"]] if tx.job.waiting else ()))
    await _save_members(tx, attempt.number, fields.get("members") or ())


async def _save_members(tx: JobTransaction, attempt: int, members: Any) -> None:
    if not members:
        return
    known = tx.members_by_attempt.get(attempt)
    if known is None:
        stored = await tx.session.scalars(
            select(AttemptMember).where(
                AttemptMember.job_id == tx.job.id, AttemptMember.attempt == attempt
            )
        )
        known = tx.members_by_attempt[attempt] = {member.rank: member for member in stored}
    for fields in members:
        rank = _integer(fields["rank"])
        member = known.get(rank)
        if member is None:
            member = known[rank] = AttemptMember(job_id=tx.job.id, attempt=attempt, rank=rank)
            tx.session.add(member)
        # A later entry for the same rank (with its final pid) replaces the earlier one.
        member.worker = text(fields.get("worker") or "")
        member.agent = text(fields.get("agent") or "")
        member.node_id = text(fields.get("node_id") or "")
        member.host = text(fields.get("host") or "")
        member.pid = _integer_or_none(fields.get("pid"))
        member.role = text(fields.get("role") or "")


async def _node_event(tx: JobTransaction, event: SupervisorEvent, rules: QuarantineRules) -> None:
    """Apply an event that concerns nodes: a health report, or an incident and its nodes."""
    if event.kind is EventKind.NODE_HEALTH:
        await nodes.record_health(tx, event.data, rules)
        return
    await _incident(tx, event.data, event)
    await nodes.record_incident(tx, event.data, rules)


async def _incident(tx: JobTransaction, fields: dict[str, Any], event: SupervisorEvent) -> None:
    number_ = _integer(fields["incident"])
    incident = await tx.session.get(IncidentRow, (tx.job.id, number_))
    if incident is None:
        incident = IncidentRow(
            job_id=tx.job.id,
            number=number_,
            opened_at=fields.get("opened_at") or event.at,
            data={},
        )
        tx.session.add(incident)
    incident.data = {
        **incident.data,
        **{name: value for name, value in fields.items() if value is not None},
    }
    if event.kind is EventKind.INCIDENT_CLOSED:
        incident.closed_at = fields.get("closed_at") or event.at
    tx.job.incidents = max(tx.job.incidents, incident.number)


async def _checkpoint_saved(tx: JobTransaction, fields: dict[str, Any], at: float) -> None:
    known = await tx.session.get(Checkpoint, (tx.job.id, text(fields["uri"])))
    if known is not None and known.deleted_at is None:
        return  # a supervisor that starts reports every checkpoint that it finds
    await _record_save_duration(tx, fields, at)
    await tx.session.merge(
        Checkpoint(
            job_id=tx.job.id,
            uri=text(fields["uri"]),
            step=_integer(fields["step"]),
            attempt=_integer(fields.get("attempt") or 0),
            tier=text(fields.get("tier") or "remote"),
            nbytes=_integer(fields.get("nbytes") or 0),
            mesh=_mesh(fields.get("mesh")),
            metrics=dict(fields.get("metrics") or {}),
            saved_at=at,
            verified_at=None,
            deleted_at=None,
            deleted_why=None,
            bad=None,
        )
    )


async def _record_save_duration(tx: JobTransaction, fields: dict[str, Any], at: float) -> None:
    """Record the time from the end of the step until its checkpoint is durable."""
    step_ended_at = await series.row_time(
        tx.session, tx.job.id, _integer(fields["step"]), _integer(fields.get("attempt") or 0)
    )
    if step_ended_at is not None and at >= step_ended_at:
        tx.checkpoints.append((text(fields.get("tier") or "remote"), "save", at - step_ended_at))


async def _checkpoint_gone(
    tx: JobTransaction, fields: dict[str, Any], event: SupervisorEvent
) -> None:
    checkpoint = await tx.session.get(Checkpoint, (tx.job.id, text(fields["uri"])))
    if checkpoint is None:
        return  # for example an incomplete leftover that was never announced; the event is stored
    if event.kind is EventKind.CHECKPOINT_BAD:
        checkpoint.bad = text(fields.get("message") or "failed verification")
    else:
        checkpoint.deleted_at = event.at
        checkpoint.deleted_why = text(fields.get("why") or "")


def _integer(value: Any) -> int:
    """`value` if it is an integer. SQLite itself would store a value of any type."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is not an integer")
    return value


def _integer_or_none(value: Any) -> int | None:
    return None if value is None else _integer(value)


def _mesh(value: Any) -> dict[str, int]:
    """A mesh as a mapping; accepts the short form `dp_shard=2,tp=2` too."""
    if isinstance(value, str):
        pairs = (axis.partition("=") for axis in value.split(",") if axis)
        return {axis: int(size) for axis, _, size in pairs}
    return dict(value or {})
