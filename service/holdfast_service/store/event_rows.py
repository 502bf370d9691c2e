"""What one event of a supervisor changes in the tables: attempts, incidents, checkpoints, the job.

Whoever calls this keeps the event itself, and what is to be done with one that cannot be read.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import select, update

from holdfast_service.job_model.lifecycle import Desired, State, observed
from holdfast_service.job_model.supervisor_protocol import EventKind, Phase, SupervisorEvent
from holdfast_service.policy.quarantine import QuarantineRules, node_name
from holdfast_service.store import nodes, series
from holdfast_service.store.json_safe import text
from holdfast_service.store.models import Attempt, AttemptMember, Checkpoint, Incident
from holdfast_service.store.transaction import Effect, JobTransaction

_TRIPS_KEPT = 20  # beside the job; the events tell of all
_OUTCOMES = (State.SUCCEEDED, State.FAILED, State.CANCELLED)


async def project(tx: JobTransaction, event: SupervisorEvent, rules: QuarantineRules) -> None:
    """Raises KeyError, TypeError, ValueError, AttributeError or StatementError for an event that
    is not as it should be; the transaction is then to be rolled back to before it."""
    said = event.data
    match event.kind:
        case EventKind.PHASE:
            move(tx, Phase(said["phase"]), at=event.at)
        case EventKind.ATTEMPT_FORMING:
            await _attempt_forming(tx, said, event.at)
        case EventKind.ATTEMPT_RUNNING:
            await _attempt_running(tx, said, event.at)
        case EventKind.ATTEMPT_ENDED:
            attempt = await _attempt(tx, _whole(said["attempt"]), event.at)
            attempt.state = "ended"
            attempt.ended_at = event.at
            attempt.reason = text(said.get("reason") or "")
            attempt.last_step = _whole_or_none(said.get("last_step"))
        case kind if kind in nodes.OF_NODES:
            await _trouble(tx, event, rules)
        case EventKind.CHECKPOINT_SAVED:
            await _checkpoint_saved(tx, said, event.at)
        case EventKind.CHECKPOINT_DELETED | EventKind.CHECKPOINT_BAD:
            await _checkpoint_gone(tx, said, event)
        case EventKind.WAITING:
            tx.job.waiting = {
                "resource": text(said["resource"]),
                "reason": text(said.get("reason") or f"waits for {said['resource']}"),
                "since": event.at,
                "until": said.get("until"),
            }
        case EventKind.MEMORY_PLACED:
            attempt = await _attempt(tx, _whole(said["attempt"]), event.at)
            attempt.memory = {
                name: said[name] for name in ("copies", "partners", "recoverable", "unprotected")
            }
        case (
            EventKind.INITIALISED_FROM
            | EventKind.STANDBY
            | EventKind.JOB_STOPPING
            | EventKind.FAULT_FAILED
            | EventKind.STALLED
            | EventKind.NODE_DRAINING
        ):
            pass  # the event itself is all there is to keep
        case EventKind.CHECKPOINT_INTERVAL | EventKind.GUARD_TRIPPED | EventKind.STRAGGLER:
            _BESIDE_THE_JOB[event.kind](tx, said, event.at)
        case EventKind.STOP_UNDONE | EventKind.ENDED:
            over = _ended if event.kind is EventKind.ENDED else _pause_undone
            await over(tx, said, event.at)


def move(tx: JobTransaction, phase: Phase, at: float | None = None) -> None:
    """Take the job to the state that its supervisor's phase says, if it may go there."""
    new = observed(tx.state, phase)
    if new is not None:
        tx.transition(new, at=at)


def _interval(tx: JobTransaction, said: dict[str, Any], at: float) -> None:
    del at
    told = {key: value for key, value in said.items() if key != "tier"}
    tx.job.intervals = {**tx.job.intervals, text(said["tier"]): told}


def _guard_tripped(tx: JobTransaction, said: dict[str, Any], at: float) -> None:
    """The ledger as it stands now, how many trips there were, and the last of them."""
    before = tx.job.guards
    told = {key: value for key, value in said.items() if key != "ledger"}
    tx.job.guards = {
        "trips": before.get("trips", 0) + 1,
        "ledger": [[_whole(first), _whole(end)] for first, end in said["ledger"]],
        "recent": [*before.get("recent", ()), {**told, "at": at}][-_TRIPS_KEPT:],
    }


def _straggler(tx: JobTransaction, said: dict[str, Any], at: float) -> None:
    """Who is slow now, by rank."""
    rank = str(_whole(said["rank"]))
    slow = {other: told for other, told in tx.job.slow.items() if other != rank}
    if said["state"] == "slow":
        node = node_name(text(said["node_id"]), text(said["host"])) if said["node_id"] else ""
        slow[rank] = {
            "rank": _whole(said["rank"]),
            "agent": text(said["agent"]),
            "node": node,
            "factor": float(said["factor"]),
            "since_step": _whole(said["since_step"]),
            "since": float(said.get("since") or at),
        }
    tx.job.slow = slow


_BESIDE_THE_JOB = {
    EventKind.CHECKPOINT_INTERVAL: _interval,
    EventKind.GUARD_TRIPPED: _guard_tripped,
    EventKind.STRAGGLER: _straggler,
}


async def _pause_undone(tx: JobTransaction, said: dict[str, Any], at: float) -> None:
    if tx.state is not State.PAUSING:
        return
    if tx.job.desired == Desired.PAUSED:
        tx.job.desired = Desired.RUNNING
    await tx.forget(Effect.PAUSE)
    tx.transition(State.RUNNING, reason=text(str(said.get("reason") or "")), at=at)


async def _ended(tx: JobTransaction, said: dict[str, Any], at: float) -> None:
    """Whatever else it says, a supervisor that has ended its job ends it here too."""
    if tx.state.terminal:
        return
    if isinstance(said.get("step"), int):
        tx.job.step = said["step"]
    if said.get("outcome") == State.PAUSED and tx.state is State.PAUSING:
        await tx.intend(Effect.RELEASE)  # it is paused once nothing of it is on the cluster
        return
    outcome = next((state for state in _OUTCOMES if state == said.get("outcome")), State.FAILED)
    if said.get("outcome") == State.PAUSED:
        outcome = State.CANCELLED  # cancelled while it was being paused
    traceback = said.get("traceback")
    tx.end(
        outcome,
        str(said.get("code") or outcome.lower()),
        str(said.get("message") or ""),
        None if not traceback else str(traceback),
        at=at,
    )


async def _attempt(tx: JobTransaction, number_: int, at: float) -> Attempt:
    attempt = await tx.session.get(Attempt, (tx.job.id, number_))
    if attempt is None:
        tx.seats[number_] = {}
        attempt = Attempt(
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


async def _attempt_forming(tx: JobTransaction, said: dict[str, Any], at: float) -> None:
    attempt = await _attempt(tx, _whole(said["attempt"]), at)
    attempt.mesh = dict(said["mesh"])
    attempt.world_size = _whole(said["world_size"])
    attempt.standbys = list(said.get("standbys") or ())
    attempt.restore = dict(said.get("restore") or {})
    attempt.cause_incident = _whole_or_none(said.get("cause_incident"))
    attempt.forming_at = at
    tx.job.attempt = max(tx.job.attempt, attempt.number)
    await _close_attempts(tx, attempt.number, at)
    await _members(tx, attempt.number, said["members"])
    seats = {str(one["rank"]): one.get("agent") for one in said["members"]}
    tx.job.slow = {r: one for r, one in tx.job.slow.items() if seats.get(r) == one["agent"]}


async def _close_attempts(tx: JobTransaction, before: int, at: float) -> None:
    """Those whose end nobody lived to tell: of one job there is one world at a time."""
    if before <= 1:
        return
    await tx.session.execute(
        update(Attempt)
        .where(Attempt.job_id == tx.job.id, Attempt.number < before, Attempt.state != "ended")
        .values(state="ended", ended_at=at, reason="lost with the nodes it ran on")
    )


async def _attempt_running(tx: JobTransaction, said: dict[str, Any], at: float) -> None:
    attempt = await _attempt(tx, _whole(said["attempt"]), at)
    attempt.state = "running"
    attempt.running_at = at
    attempt.joined = {str(rank): how for rank, how in (said.get("joined") or {}).items()}
    attempt.first_step = _whole_or_none(said.get("first_step"))
    tx.waits_no_more(*([tx.job.waiting["resource"]] if tx.job.waiting else ()))
    await _members(tx, attempt.number, said.get("members") or ())


async def _members(tx: JobTransaction, attempt: int, members: Any) -> None:
    if not members:
        return
    known = tx.seats.get(attempt)
    if known is None:
        stored = await tx.session.scalars(
            select(AttemptMember).where(
                AttemptMember.job_id == tx.job.id, AttemptMember.attempt == attempt
            )
        )
        known = tx.seats[attempt] = {one.rank: one for one in stored}
    for said in members:
        rank = _whole(said["rank"])
        member = known.get(rank)
        if member is None:
            member = known[rank] = AttemptMember(job_id=tx.job.id, attempt=attempt, rank=rank)
            tx.session.add(member)
        # A later word on the same rank (its final pid) replaces the earlier one.
        member.worker = text(said.get("worker") or "")
        member.agent = text(said.get("agent") or "")
        member.node_id = text(said.get("node_id") or "")
        member.host = text(said.get("host") or "")
        member.pid = _whole_or_none(said.get("pid"))
        member.role = text(said.get("role") or "")


async def _trouble(tx: JobTransaction, event: SupervisorEvent, rules: QuarantineRules) -> None:
    """What went wrong, and what it says of nodes."""
    if event.kind is EventKind.NODE_HEALTH:
        await nodes.note_health(tx, event.data, rules)
        return
    await _incident(tx, event.data, event)
    await nodes.note_incident(tx, event.data, rules)


async def _incident(tx: JobTransaction, said: dict[str, Any], event: SupervisorEvent) -> None:
    number_ = _whole(said["incident"])
    incident = await tx.session.get(Incident, (tx.job.id, number_))
    if incident is None:
        incident = Incident(
            job_id=tx.job.id,
            number=number_,
            opened_at=said.get("opened_at") or event.at,
            data={},
        )
        tx.session.add(incident)
    incident.data = {
        **incident.data,
        **{field: value for field, value in said.items() if value is not None},
    }
    if event.kind is EventKind.INCIDENT_CLOSED:
        incident.closed_at = said.get("closed_at") or event.at
    tx.job.incidents = max(tx.job.incidents, incident.number)


async def _checkpoint_saved(tx: JobTransaction, said: dict[str, Any], at: float) -> None:
    known = await tx.session.get(Checkpoint, (tx.job.id, text(said["uri"])))
    if known is not None and known.deleted_at is None:
        return  # a supervisor that begins tells of all that it finds
    await _time_of_saving(tx, said, at)
    await tx.session.merge(
        Checkpoint(
            job_id=tx.job.id,
            uri=text(said["uri"]),
            step=_whole(said["step"]),
            attempt=_whole(said.get("attempt") or 0),
            tier=text(said.get("tier") or "remote"),
            nbytes=_whole(said.get("nbytes") or 0),
            mesh=_mesh(said.get("mesh")),
            metrics=dict(said.get("metrics") or {}),
            saved_at=at,
            verified_at=None,
            deleted_at=None,
            deleted_why=None,
            bad=None,
        )
    )


async def _time_of_saving(tx: JobTransaction, said: dict[str, Any], at: float) -> None:
    """From the end of the step until its checkpoint is durable."""
    made = await series.made_at(
        tx.session, tx.job.id, _whole(said["step"]), _whole(said.get("attempt") or 0)
    )
    if made is not None and at >= made:
        tx.checkpoints.append((text(said.get("tier") or "remote"), "save", at - made))


async def _checkpoint_gone(
    tx: JobTransaction, said: dict[str, Any], event: SupervisorEvent
) -> None:
    checkpoint = await tx.session.get(Checkpoint, (tx.job.id, text(said["uri"])))
    if checkpoint is None:
        return  # e.g. an incomplete leftover: never announced, its end is in the events
    if event.kind is EventKind.CHECKPOINT_BAD:
        checkpoint.bad = text(said.get("message") or "failed verification")
    else:
        checkpoint.deleted_at = event.at
        checkpoint.deleted_why = text(said.get("why") or "")


def _whole(said: Any) -> int:
    """A whole number; SQLite would keep anything in its place."""
    if isinstance(said, bool) or not isinstance(said, int):
        raise TypeError(f"{said!r} is no whole number")
    return said


def _whole_or_none(said: Any) -> int | None:
    return None if said is None else _whole(said)


def _mesh(said: Any) -> dict[str, int]:
    """A mesh as a mapping; also from its short form `dp_shard=2,tp=2`."""
    if isinstance(said, str):
        pairs = (axis.partition("=") for axis in said.split(",") if axis)
        return {axis: int(size) for axis, _, size in pairs}
    return dict(said or {})
