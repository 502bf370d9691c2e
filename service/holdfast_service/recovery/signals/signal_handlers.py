"""Handlers of worker and agent signals: they select signals of the present world and apply them.

Signals may be repeated, early or late. A signal of another incarnation, attempt or worker changes
nothing; only the death of a worker is always recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from holdfast_service.job_model.events.checkpoints import CheckpointBadEvent
from holdfast_service.placement.restore_points import BadCopy
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.recovery.core_state.stage_timer import WITH_WORLD, Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.core_state.worlds import Member
from holdfast_service.recovery.faults import (
    corruption,
    guard_decisions,
    hang_suspicion,
    judgement,
    node_eviction,
)
from holdfast_service.recovery.upkeep import remote_outage
from holdfast_service.recovery.upkeep.partners import handle_link_failed
from holdfast_service.recovery.world import attempt_formation, checkpoint_finalization
from holdfast_workers.errors import short_error
from holdfast_workers.protocol.messages import (
    ErrorKind,
    ErrorReport,
    Place,
    Signal,
    SignalKind,
    Tier,
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


def handle_signals(state: CoreState, signals: Sequence[Signal], now: float) -> None:
    """Handle signals in their order; signals after the end of the job are ignored."""
    for signal in signals:
        if state.timer.stage is not Stage.ENDED:
            handle_signal(state, signal, now)


def handle_signal(state: CoreState, signal: Signal, now: float) -> None:
    """Handle one signal, which may be repeated, early or late."""
    if signal.kind is SignalKind.WORKER_EXITED and signal.worker is not None:
        state.roster.mark_dead(signal.worker)  # true in any state of the core
    if state.timer.stage is Stage.ADOPTING:
        state.inbox.keep_signal(signal)
        return
    if not state.roster.is_current(signal.agent, signal.incarnation):
        return
    _HANDLERS[signal.kind](state, signal, now)


def record_saved_shard(
    state: CoreState, attempt: int, rank: int | None, record: dict[str, Any]
) -> None:
    """Record that a rank's shard is durable. A shard of an ended attempt counts while its step is
    on the present line: a save continues after its worker has died."""
    step = int(record["step"])
    if rank is not None and state.progress.line.contains(attempt, step, formed_too=True):
        state.saves.record_shard(attempt, step, rank, record)


def _find_member(state: CoreState, signal: Signal) -> Member | None:
    """The member of the present world that the signal refers to."""
    world = state.worlds.present
    if world is None or state.timer.stage not in WITH_WORLD:
        return None
    for member in world.members.values():
        if member.worker is not None and member.worker == signal.worker:
            return member if member.agent == signal.agent else None
    if signal.attempt != world.attempt or signal.rank is None:
        return None
    seated = world.members.get(signal.rank)
    return seated if seated is not None and seated.agent == signal.agent else None


def _member_of_attempt(state: CoreState, signal: Signal) -> Member | None:
    member = _find_member(state, signal)
    if (
        member is None
        or state.worlds.present is None
        or signal.attempt != state.worlds.present.attempt
    ):
        return None
    if signal.worker is not None and not state.roster.is_dead(signal.worker):
        member.record_worker(signal.worker, signal.pid or signal.detail.get("pid"))
    return member


def _handle_worker_exited(state: CoreState, signal: Signal, now: float) -> None:
    member = _find_member(state, signal)
    if member is None:
        state.add_evidence(
            f"worker {signal.worker} of {signal.agent} ended ({_exit_description(signal)})"
        )
        return
    if member.done:
        return  # it has finished all steps, and a saver process already has its shard
    step = int(signal.detail.get("step", 0)) or state.progress.committed
    description = (
        f"rank {member.rank} on {signal.agent} ended by {_exit_description(signal)} at step {step}"
    )
    ended_by, short = _ended_by(signal), str(signal.detail.get("out_of_memory") or "")
    cause = Cause.PREEMPTED if ended_by == "SIGTERM" else Cause.WORKER_CRASH
    if short:
        cause, description = Cause.OUT_OF_MEMORY, f"{description}: {short}"
    judgement.report_fault(
        state,
        Fault(
            cause,
            attempt=state.worlds.attempt,
            at=signal.at,
            what=description,
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


def _exit_description(signal: Signal) -> str:
    why = f": {signal.detail['why']}" if signal.detail.get("why") else ""
    return f"{_ended_by(signal)}{why}".removeprefix(": ") or "an unknown cause"


def _handle_worker_failed(state: CoreState, signal: Signal, now: float) -> None:
    member = _member_of_attempt(state, signal)
    if member is None:
        return
    error = _error_report(signal)
    if error.kind is ErrorKind.CORRUPTION:
        corruption.handle_corruption(state, signal, error, now)
        return
    cause = CAUSES[error.kind]
    if signal.detail.get("trip"):
        guard_decisions.apply_guard_trip(state, signal.attempt, signal.detail["trip"])
    if _follows_from_restored_state(state, error):
        cause = Cause.NOT_FINITE
        for rank in state.worlds.present.members if state.worlds.present is not None else ():
            judgement.distrust_state(state, rank, f"not finite: {error.message}")
    if cause is Cause.BAD_STATE:
        damaged = error.kind is ErrorKind.DAMAGED
        judgement.distrust_source(state, member.rank, for_ever=damaged, why=error.message)
    if cause is Cause.INTERNAL_ERROR and signal.worker is not None:
        state.roster.exclude_worker(signal.worker)
    summary = short_error(error.message) if error.kind is ErrorKind.COMMUNICATION else error.message
    judgement.report_fault(
        state,
        Fault(
            cause,
            attempt=state.worlds.attempt,
            at=signal.at,
            what=(
                f"rank {member.rank} on {signal.agent} failed at step {error.step} with "
                f"{error.type}: {summary}"
            ),
            rank=member.rank,
            worker=signal.worker,
            agent=signal.agent,
            step=error.step,
            error=error,
        ),
        now,
    )


def _follows_from_restored_state(state: CoreState, error: ErrorReport) -> bool:
    """Whether a step was not finite right after a restore. Only finite steps are applied, so the
    saved state is suspect. If the same step was already not finite before, the step itself is at
    fault: it is a user error."""
    world = state.worlds.present
    if error.kind is not ErrorKind.NOT_FINITE or world is None:
        return False
    restored = all(member.restore.tier is not Tier.INIT for member in world.members.values())
    mark = state.progress.mark
    seen_before = mark is not None and (mark.type, mark.step) == (error.type, error.step)
    return restored and error.step <= world.restored_step and not seen_before


def _error_report(signal: Signal) -> ErrorReport:
    error = signal.detail["error"]
    if isinstance(error, ErrorReport):
        return error
    return ErrorReport(**{**error, "kind": ErrorKind(error["kind"])})


def _handle_worker_joined(state: CoreState, signal: Signal, now: float) -> None:
    member = _member_of_attempt(state, signal)
    if member is None:
        return
    member.record_joined(dict(signal.detail.get("phases_s", {})))
    attempt_formation.advance(state, now)


def _handle_first_step(state: CoreState, signal: Signal, now: float) -> None:
    if _member_of_attempt(state, signal) is None or state.worlds.present is None:
        return
    record_committed_step(state, signal.attempt, int(signal.detail.get("step", 0)), now)


def record_committed_step(state: CoreState, attempt: int, step: int, now: float) -> None:
    """Record that a signal or a metric row shows a committed step of the attempt."""
    state.progress.record_step(attempt, step)
    world = state.worlds.present
    if world is None or attempt != world.attempt or step <= world.restored_step:
        return
    world.record_first_step(step, now)
    attempt_formation.advance(state, now)


def _handle_worker_done(state: CoreState, signal: Signal, now: float) -> None:
    member = _member_of_attempt(state, signal)
    if member is None:
        return
    member.record_done()
    step = int(signal.detail["step"])
    state.ending.record_final_step(step)
    state.progress.record_step(signal.attempt, step)
    if state.timer.stage is Stage.FORMING:
        attempt_formation.advance(state, now)
    elif state.timer.stage in (Stage.RUNNING, Stage.FINISHING):
        attempt_formation.finish_if_complete(state, now)


def _handle_shard_failed(state: CoreState, signal: Signal, now: float) -> None:
    """Abandon a periodic checkpoint. For the last checkpoint, report a fault: it is worth another
    attempt."""
    step = int(signal.detail["step"])
    message = str(signal.detail.get("message", ""))
    if not state.saves.abandon(signal.attempt, step):
        return  # another rank has already abandoned it
    if signal.attempt != state.worlds.attempt or state.timer.stage not in WITH_WORLD:
        return
    description = f"rank {signal.rank} on {signal.agent} could not save step {step}: {message}"
    stopping = state.ending.stop is not None and step >= (state.ending.final_step or 0)
    if signal.detail.get("superseded") or (step < state.config.steps and not stopping):
        state.emit(CheckpointBadEvent(step=step, message=description))
        return
    fault = Fault(
        Cause.CHECKPOINT_FAILED,
        attempt=state.worlds.attempt,
        at=signal.at,
        what=description,
        rank=signal.rank,
        agent=signal.agent,
        step=step,
        certain=False,
    )
    judgement.report_fault(state, fault, now)


def _handle_shard_delayed(state: CoreState, signal: Signal, now: float) -> None:
    """The remote tier refused a shard; the agent retries."""
    step = int(signal.detail["step"])
    why = f"rank {signal.rank} on {signal.agent} cannot save step {step}: "
    description = why + str(signal.detail.get("message", ""))
    remote_outage.open_outage(
        state,
        now,
        at=signal.at,
        description=description,
        step=step,
        rank=signal.rank,
        agent=signal.agent,
    )


def _handle_shard_saved(state: CoreState, signal: Signal, now: float) -> None:
    del now
    record_saved_shard(state, signal.attempt, signal.rank, signal.detail)


def _handle_zygote_lost(state: CoreState, signal: Signal, now: float) -> None:
    del now
    unfit = str(signal.detail.get("unfit") or "")
    if unfit:
        state.roster.mark_unfit(signal.agent, unfit)
        state.add_evidence(f"agent {signal.agent} cannot run workers any more: {unfit}")
    else:
        state.add_evidence(f"the zygote of agent {signal.agent} died and is being restarted")


def _handle_partner_lost(state: CoreState, signal: Signal, now: float) -> None:
    partner = str(signal.detail.get("partner", ""))
    if _member_of_attempt(state, signal) is None or not partner:
        return
    handle_link_failed(state, signal.agent, partner, now)


def _handle_sources_lost(state: CoreState, signal: Signal, now: float) -> None:
    """Record the parts of a rank's state that could not be fetched; the rank is about to fail."""
    member = _member_of_attempt(state, signal)
    if member is not None:
        lost = {(agent, Place(place), rank) for agent, place, rank in signal.detail["origins"]}
        judgement.distrust_origins(state, member.restore, lost, str(signal.detail["message"]))


def _handle_bad_shard(state: CoreState, signal: Signal, now: float) -> None:
    """A saved state failed its verification: never restore it again. During a restore this is also
    a fault."""
    message = str(signal.detail.get("message", "a saved state failed its verification"))
    member = _member_of_attempt(state, signal)
    if (
        member is not None
        and member.restore.tier is not Tier.RESHARD  # another source may have it whole
        and not member.joined
        and state.timer.stage
        in (
            Stage.FORMING,
            Stage.GATHERING,
        )
    ):
        judgement.distrust_source(state, member.rank, for_ever=True, why=message)
        description = f"rank {member.rank} on {signal.agent} restored a bad state: {message}"
        fault = Fault(
            Cause.BAD_STATE,
            attempt=state.worlds.attempt,
            at=signal.at,
            what=description,
            rank=member.rank,
            worker=signal.worker,
            agent=signal.agent,
            step=member.restore.step,
        )
        judgement.report_fault(state, fault, now)
        return
    place, step = signal.detail.get("place"), signal.detail.get("step")
    if place and step is not None and signal.rank is not None:
        computed = int(signal.detail.get("attempt", signal.attempt))
        bad = BadCopy(signal.agent, Place(place), signal.rank, computed, int(step))
        judgement.record_bad_copy(state, bad, message)


def _handle_rank_stalled(state: CoreState, signal: Signal, now: float) -> None:
    member = _member_of_attempt(state, signal)
    if member is not None and not member.done:
        hang_suspicion.handle_rank_stalled(
            state, int(signal.detail["beat"]["step"]), signal.at, now
        )


_HANDLERS: dict[SignalKind, Callable[[CoreState, Signal, float], None]] = {
    SignalKind.WORKER_EXITED: _handle_worker_exited,
    SignalKind.WORKER_FAILED: _handle_worker_failed,
    SignalKind.WORKER_JOINED: _handle_worker_joined,
    SignalKind.FIRST_STEP: _handle_first_step,
    SignalKind.WORKER_DONE: _handle_worker_done,
    SignalKind.SHARD_SAVED: _handle_shard_saved,
    SignalKind.SHARD_FAILED: _handle_shard_failed,
    SignalKind.SHARD_DELAYED: _handle_shard_delayed,
    SignalKind.RECOMPUTED: corruption.handle_recomputed,
    SignalKind.RETENTION_DONE: checkpoint_finalization.handle_tidied,
    SignalKind.PARTNER_LOST: _handle_partner_lost,
    SignalKind.ZYGOTE_LOST: _handle_zygote_lost,
    SignalKind.SOURCES_LOST: _handle_sources_lost,
    SignalKind.NODE_UNWELL: node_eviction.handle_health_signal,
    SignalKind.BAD_SHARD: _handle_bad_shard,
    SignalKind.RANK_STALLED: _handle_rank_stalled,
    SignalKind.GUARD_TRIPPED: guard_decisions.handle_guard_tripped,
}
