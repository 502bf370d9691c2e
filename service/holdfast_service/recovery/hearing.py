"""What signals mean: which of them speak of the present world, and what they say of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from holdfast_service.policy import Cause, Fault
from holdfast_service.recovery import faults, forming
from holdfast_service.recovery.partners import mend_partners
from holdfast_service.recovery.state import WITH_WORLD, Member, Stage, State
from holdfast_service.registry import BadCopy
from holdfast_service.reports import EventKind
from holdfast_workers.messages import (
    ErrorKind,
    Place,
    Signal,
    SignalKind,
    WorkerError,
)

CAUSES = {
    ErrorKind.COMMUNICATION: Cause.COMMUNICATION,
    ErrorKind.USER: Cause.USER_ERROR,
    ErrorKind.RESTORE: Cause.BAD_STATE,
    ErrorKind.INTERNAL: Cause.INTERNAL_ERROR,
}


def hear_all(state: State, signals: Sequence[Signal], now: float) -> None:
    """In their order; after the end of the job nothing is heard any more."""
    for signal in signals:
        if state.stage is not Stage.ENDED:
            hear(state, signal, now)


def hear(state: State, signal: Signal, now: float) -> None:
    """One signal, new or repeated, early or late."""
    if signal.kind is SignalKind.WORKER_EXITED and signal.worker is not None:
        state.roster.bury(signal.worker)  # true whatever else is known
    if state.stage is Stage.ADOPTING:
        state.early.append(signal)
        return
    if not state.roster.is_current(signal.agent, signal.incarnation):
        return
    _HEARERS[signal.kind](state, signal, now)


def shard_saved(state: State, attempt: int, rank: int | None, record: dict[str, Any]) -> None:
    """A rank's shard is durable. What an older attempt saves is not published any more."""
    if rank is not None and attempt == state.attempt and state.stage in WITH_WORLD:
        state.saves.add(attempt, int(record["step"]), rank, record)


def _member(state: State, signal: Signal) -> Member | None:
    """The member of the present world that the signal speaks of."""
    world = state.world
    if world is None or state.stage not in WITH_WORLD:
        return None
    for member in world.members.values():
        if member.worker is not None and member.worker == signal.worker:
            return member if member.agent == signal.agent else None
    if signal.attempt != world.attempt or signal.rank is None:
        return None
    seated = world.members.get(signal.rank)
    return seated if seated is not None and seated.agent == signal.agent else None


def _of_this_attempt(state: State, signal: Signal) -> Member | None:
    member = _member(state, signal)
    if member is None or state.world is None or signal.attempt != state.world.attempt:
        return None
    if signal.worker is not None and not state.roster.is_dead(signal.worker):
        member.worker = signal.worker
        member.pid = signal.pid or signal.detail.get("pid") or member.pid
    return member


def _exited(state: State, signal: Signal, now: float) -> None:
    member = _member(state, signal)
    if member is None:
        state.note(f"worker {signal.worker} of {signal.agent} ended ({_how(signal)})")
        return
    if member.done:
        return  # it has done all its steps; its shard is in the hands of a saver by now
    step = int(signal.detail.get("step", 0)) or state.committed
    what = f"rank {member.rank} on {signal.agent} ended by {_how(signal)} at step {step}"
    faults.accuse(
        state,
        Fault(
            Cause.WORKER_CRASH,
            attempt=state.attempt,
            at=signal.at,
            what=what,
            rank=member.rank,
            worker=signal.worker,
            agent=signal.agent,
            step=step,
        ),
        now,
    )


def _how(signal: Signal) -> str:
    why = f": {signal.detail['why']}" if signal.detail.get("why") else ""
    for key in ("signal", "exit_code"):
        if signal.detail.get(key) is not None:
            return f"{key.replace('_', ' ')} {signal.detail[key]}{why}"
    return why.removeprefix(": ") or "an unknown cause"


def _failed(state: State, signal: Signal, now: float) -> None:
    member = _of_this_attempt(state, signal)
    if member is None:
        return
    error = _error(signal)
    cause = CAUSES[error.kind]
    if cause is Cause.BAD_STATE:
        faults.distrust_source(state, member.rank, for_ever=False, why=error.message)
    if cause is Cause.INTERNAL_ERROR and signal.worker is not None:
        state.roster.doubt(signal.worker)
    what = f"rank {member.rank} on {signal.agent}: {error.type} at step {error.step}: "
    faults.accuse(
        state,
        Fault(
            cause,
            attempt=state.attempt,
            at=signal.at,
            what=what + error.message,
            rank=member.rank,
            worker=signal.worker,
            agent=signal.agent,
            step=error.step,
            error=error,
        ),
        now,
    )


def _error(signal: Signal) -> WorkerError:
    told = signal.detail["error"]
    if isinstance(told, WorkerError):
        return told
    return WorkerError(**{**told, "kind": ErrorKind(told["kind"])})


def _joined(state: State, signal: Signal, now: float) -> None:
    member = _of_this_attempt(state, signal)
    if member is None:
        return
    member.joined = True
    member.phases_s = dict(signal.detail.get("phases_s", {}))
    forming.advance(state, now)


def _first_step(state: State, signal: Signal, now: float) -> None:
    if _of_this_attempt(state, signal) is None or state.world is None:
        return
    first_step_seen(state, signal.attempt, int(signal.detail.get("step", 0)), now)


def first_step_seen(state: State, attempt: int, step: int, now: float) -> None:
    """A step of the attempt is known to be committed, by signal or by metric row."""
    state.note_step(attempt, step)
    world = state.world
    if world is None or attempt != world.attempt or step <= world.restored_step:
        return
    if world.first_step is None:
        world.first_step, world.first_step_at = step, now
    forming.advance(state, now)


def _done(state: State, signal: Signal, now: float) -> None:
    member = _of_this_attempt(state, signal)
    if member is None:
        return
    member.done = True
    state.note_step(signal.attempt, int(signal.detail.get("step", state.config.steps)))
    if state.stage is Stage.FORMING:
        forming.advance(state, now)
    elif state.stage in (Stage.RUNNING, Stage.FINISHING):
        forming.finish(state, now)


def _shard_failed(state: State, signal: Signal, now: float) -> None:
    """A periodic checkpoint is given up; the last one is worth another attempt."""
    step = int(signal.detail["step"])
    message = str(signal.detail.get("message", ""))
    if signal.attempt != state.attempt or state.stage not in WITH_WORLD:
        return
    state.saves.drop(signal.attempt, step)
    what = f"rank {signal.rank} on {signal.agent} could not save step {step}: {message}"
    if step < state.config.steps:
        state.emit(EventKind.CHECKPOINT_BAD, step=step, uri="", message=what)
        return
    fault = Fault(
        Cause.CHECKPOINT_FAILED,
        attempt=state.attempt,
        at=signal.at,
        what=what,
        rank=signal.rank,
        agent=signal.agent,
        step=step,
        certain=False,
    )
    faults.accuse(state, fault, now)


def _shard_saved(state: State, signal: Signal, now: float) -> None:
    del now
    shard_saved(state, signal.attempt, signal.rank, signal.detail)


def _zygote_lost(state: State, signal: Signal, now: float) -> None:
    del now
    state.note(f"the zygote of {signal.agent} died; another is being started")


def _partner_lost(state: State, signal: Signal, now: float) -> None:
    del now
    partner = str(signal.detail.get("partner", ""))
    if _of_this_attempt(state, signal) is None or not partner:
        return
    state.bad_links.add((signal.agent, partner))
    mend_partners(state)


def _bad_shard(state: State, signal: Signal, now: float) -> None:
    """A saved state failed its verification: quarantine it; while restoring, that is a fault."""
    message = str(signal.detail.get("message", "a saved state failed its verification"))
    member = _of_this_attempt(state, signal)
    if (
        member is not None
        and not member.joined
        and state.stage
        in (
            Stage.FORMING,
            Stage.GATHERING,
        )
    ):
        faults.distrust_source(state, member.rank, for_ever=True, why=message)
        what = f"rank {member.rank} on {signal.agent} was given a bad state: {message}"
        fault = Fault(
            Cause.BAD_STATE,
            attempt=state.attempt,
            at=signal.at,
            what=what,
            rank=member.rank,
            worker=signal.worker,
            agent=signal.agent,
            step=member.restore.step,
        )
        faults.accuse(state, fault, now)
        return
    place, step = signal.detail.get("place"), signal.detail.get("step")
    if place and step is not None and signal.rank is not None:
        computed = int(signal.detail.get("attempt", signal.attempt))
        faults.add_bad(state, BadCopy(signal.agent, Place(place), signal.rank, computed, int(step)))


_HEARERS: dict[SignalKind, Callable[[State, Signal, float], None]] = {
    SignalKind.WORKER_EXITED: _exited,
    SignalKind.WORKER_FAILED: _failed,
    SignalKind.WORKER_JOINED: _joined,
    SignalKind.FIRST_STEP: _first_step,
    SignalKind.WORKER_DONE: _done,
    SignalKind.SHARD_SAVED: _shard_saved,
    SignalKind.SHARD_FAILED: _shard_failed,
    SignalKind.PARTNER_LOST: _partner_lost,
    SignalKind.ZYGOTE_LOST: _zygote_lost,
    SignalKind.BAD_SHARD: _bad_shard,
}
