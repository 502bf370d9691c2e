"""What signals mean: which of them speak of the present world, and what they say of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.placement.restore_points import BadCopy
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.recovery.core_state.state import WITH_WORLD, Member, Stage, State
from holdfast_service.recovery.faults import (
    corruption,
    guard_decisions,
    hang_suspicion,
    judgement,
    node_eviction,
)
from holdfast_service.recovery.upkeep import remote_outage
from holdfast_service.recovery.upkeep.partners import link_failed
from holdfast_service.recovery.world import attempt_formation, checkpoint_finalization
from holdfast_workers.errors import complaint
from holdfast_workers.protocol.messages import (
    ErrorKind,
    Place,
    Signal,
    SignalKind,
    Tier,
    WorkerError,
)

CAUSES = {
    ErrorKind.COMMUNICATION: Cause.COMMUNICATION,
    ErrorKind.USER: Cause.USER_ERROR,
    ErrorKind.NOT_FINITE: Cause.USER_ERROR,
    ErrorKind.GUARD: Cause.GUARD,
    ErrorKind.GUARD_STOP: Cause.GUARD,
    ErrorKind.RESTORE: Cause.BAD_STATE,
    ErrorKind.DAMAGED: Cause.BAD_STATE,
    ErrorKind.STORAGE: Cause.RESTORE_UNAVAILABLE,
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
    """A rank's shard is durable. That of an attempt which has ended counts as long as the step is
    part of history: a save goes on when a worker dies."""
    step = int(record["step"])
    if rank is not None and state.line.holds(attempt, step, formed_too=True):
        state.saves.add(attempt, step, rank, record)


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
    ended_by, short = _ended_by(signal), str(signal.detail.get("out_of_memory") or "")
    cause = Cause.PREEMPTED if ended_by == "SIGTERM" else Cause.WORKER_CRASH
    if short:
        cause, what = Cause.OUT_OF_MEMORY, f"{what}: {short}"
    judgement.accuse(
        state,
        Fault(
            cause,
            attempt=state.attempt,
            at=signal.at,
            what=what,
            rank=member.rank,
            worker=signal.worker,
            agent=signal.agent,
            step=step,
            ended_by=ended_by,
        ),
        now,
    )


def _ended_by(signal: Signal) -> str:
    """See `Fault.ended_by`."""
    detail = signal.detail
    if detail.get("exit_code") is not None:
        return f"exit code {detail['exit_code']}"
    return str(detail.get("name") or detail.get("signal") or "")


def _how(signal: Signal) -> str:
    why = f": {signal.detail['why']}" if signal.detail.get("why") else ""
    return f"{_ended_by(signal)}{why}".removeprefix(": ") or "an unknown cause"


def _failed(state: State, signal: Signal, now: float) -> None:
    member = _of_this_attempt(state, signal)
    if member is None:
        return
    error = _error(signal)
    if error.kind is ErrorKind.CORRUPTION:
        corruption.found(state, signal, error, now)
        return
    cause = CAUSES[error.kind]
    if signal.detail.get("trip"):
        guard_decisions.heed(state, signal.attempt, signal.detail["trip"])
    if _follows_from_restored_state(state, error):
        cause = Cause.NOT_FINITE
        for rank in state.world.members if state.world is not None else ():
            judgement.distrust_state(state, rank, f"not finite: {error.message}")
    if cause is Cause.BAD_STATE:
        damaged = error.kind is ErrorKind.DAMAGED
        judgement.distrust_source(state, member.rank, for_ever=damaged, why=error.message)
    if cause is Cause.INTERNAL_ERROR and signal.worker is not None:
        state.roster.doubt(signal.worker)
    said = complaint(error.message) if error.kind is ErrorKind.COMMUNICATION else error.message
    judgement.accuse(
        state,
        Fault(
            cause,
            attempt=state.attempt,
            at=signal.at,
            what=f"rank {member.rank} on {signal.agent}: {error.type} at step {error.step}: {said}",
            rank=member.rank,
            worker=signal.worker,
            agent=signal.agent,
            step=error.step,
            error=error,
        ),
        now,
    )


def _follows_from_restored_state(state: State, error: WorkerError) -> bool:
    """Whether a step was not finite right after a restore. Whoever computed that state went on
    from finite values, for no other step is applied: so the saved state is suspected. Unless the
    same step was not finite before: then it is the step's own fault, and the user's."""
    world = state.world
    if error.kind is not ErrorKind.NOT_FINITE or world is None:
        return False
    restored = all(one.restore.tier is not Tier.INIT for one in world.members.values())
    mark = state.mark
    seen_before = mark is not None and (mark.type, mark.step) == (error.type, error.step)
    return restored and error.step <= world.restored_step and not seen_before


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
    attempt_formation.advance(state, now)


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
    attempt_formation.advance(state, now)


def _done(state: State, signal: Signal, now: float) -> None:
    member = _of_this_attempt(state, signal)
    if member is None:
        return
    member.done = True
    state.final_step = int(signal.detail["step"])
    state.note_step(signal.attempt, state.final_step)
    if state.stage is Stage.FORMING:
        attempt_formation.advance(state, now)
    elif state.stage in (Stage.RUNNING, Stage.FINISHING):
        attempt_formation.finish(state, now)


def _shard_failed(state: State, signal: Signal, now: float) -> None:
    """A periodic checkpoint is given up; the last one is worth another attempt."""
    step = int(signal.detail["step"])
    message = str(signal.detail.get("message", ""))
    if not state.saves.drop(signal.attempt, step):
        return  # another rank has given it up before
    if signal.attempt != state.attempt or state.stage not in WITH_WORLD:
        return
    what = f"rank {signal.rank} on {signal.agent} could not save step {step}: {message}"
    stopping = state.stop is not None and step >= (state.final_step or 0)
    if signal.detail.get("superseded") or (step < state.config.steps and not stopping):
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
    judgement.accuse(state, fault, now)


def _shard_delayed(state: State, signal: Signal, now: float) -> None:
    """The remote tier does not take a shard; its agent tries again."""
    step = int(signal.detail["step"])
    why = f"rank {signal.rank} on {signal.agent} cannot save step {step}: "
    what = why + str(signal.detail.get("message", ""))
    remote_outage.noticed(
        state, now, at=signal.at, what=what, step=step, rank=signal.rank, agent=signal.agent
    )


def _shard_saved(state: State, signal: Signal, now: float) -> None:
    del now
    shard_saved(state, signal.attempt, signal.rank, signal.detail)


def _zygote_lost(state: State, signal: Signal, now: float) -> None:
    del now
    unfit = str(signal.detail.get("unfit") or "")
    if unfit:
        state.roster.is_unfit(signal.agent, unfit)
        state.note(f"{signal.agent} cannot run workers any more: {unfit}")
    else:
        state.note(f"the zygote of {signal.agent} died; another is being started")


def _partner_lost(state: State, signal: Signal, now: float) -> None:
    partner = str(signal.detail.get("partner", ""))
    if _of_this_attempt(state, signal) is None or not partner:
        return
    link_failed(state, signal.agent, partner, now)


def _sources_lost(state: State, signal: Signal, now: float) -> None:
    """A rank is about to fail for want of parts of its state: these could not be had."""
    member = _of_this_attempt(state, signal)
    if member is not None:
        lost = {(agent, Place(place), rank) for agent, place, rank in signal.detail["origins"]}
        judgement.distrust_origins(state, member.restore, lost, str(signal.detail["message"]))


def _bad_shard(state: State, signal: Signal, now: float) -> None:
    """A saved state failed its verification: quarantine it; while restoring, that is a fault."""
    message = str(signal.detail.get("message", "a saved state failed its verification"))
    member = _of_this_attempt(state, signal)
    if (
        member is not None
        and member.restore.tier is not Tier.RESHARD  # another source may have it whole
        and not member.joined
        and state.stage
        in (
            Stage.FORMING,
            Stage.GATHERING,
        )
    ):
        judgement.distrust_source(state, member.rank, for_ever=True, why=message)
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
        judgement.accuse(state, fault, now)
        return
    place, step = signal.detail.get("place"), signal.detail.get("step")
    if place and step is not None and signal.rank is not None:
        computed = int(signal.detail.get("attempt", signal.attempt))
        bad = BadCopy(signal.agent, Place(place), signal.rank, computed, int(step))
        judgement.add_bad(state, bad, message)


def _stalled(state: State, signal: Signal, now: float) -> None:
    member = _of_this_attempt(state, signal)
    if member is not None and not member.done:
        hang_suspicion.stalled(state, int(signal.detail["beat"]["step"]), signal.at, now)


_HEARERS: dict[SignalKind, Callable[[State, Signal, float], None]] = {
    SignalKind.WORKER_EXITED: _exited,
    SignalKind.WORKER_FAILED: _failed,
    SignalKind.WORKER_JOINED: _joined,
    SignalKind.FIRST_STEP: _first_step,
    SignalKind.WORKER_DONE: _done,
    SignalKind.SHARD_SAVED: _shard_saved,
    SignalKind.SHARD_FAILED: _shard_failed,
    SignalKind.SHARD_DELAYED: _shard_delayed,
    SignalKind.RECOMPUTED: corruption.recomputed,
    SignalKind.TIDIED: checkpoint_finalization.tidied,
    SignalKind.PARTNER_LOST: _partner_lost,
    SignalKind.ZYGOTE_LOST: _zygote_lost,
    SignalKind.SOURCES_LOST: _sources_lost,
    SignalKind.NODE_UNWELL: node_eviction.health_told,
    SignalKind.BAD_SHARD: _bad_shard,
    SignalKind.RANK_STALLED: _stalled,
    SignalKind.GUARD_TRIPPED: guard_decisions.tripped,
}
