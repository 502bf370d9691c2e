"""Handlers of worker and agent signals: they select signals of the present world and apply them.

Signals may be repeated, early or late. A signal of another incarnation, attempt or worker changes
nothing; only the death of a worker is always recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

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
from holdfast_workers.protocol.messages import ErrorKind, ErrorReport, Tier
from holdfast_workers.protocol.signals import (
    DamagedShard,
    FirstStep,
    GuardTripReported,
    NodeUnwell,
    PartnerLost,
    RankStalled,
    RetentionDone,
    ShardDelayed,
    ShardFailed,
    ShardRecord,
    ShardSaved,
    Signal,
    SignalKind,
    SourcesLost,
    StepRecomputed,
    WorkerDone,
    WorkerExited,
    WorkerFailed,
    WorkerJoined,
    ZygoteLost,
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
    ErrorKind.CORRUPTION: Cause.INTERNAL_ERROR,  # reported without a finding
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
    _dispatch(state, signal, now)


def record_saved_shard(state: CoreState, shard: ShardRecord) -> None:
    """Record that a rank's shard is durable. A shard of an ended attempt counts while its step is
    on the present line: a save continues after its worker has died."""
    if state.progress.line.contains(shard.attempt, shard.step, formed_too=True):
        state.saves.record_shard(shard)


def _dispatch(state: CoreState, signal: Signal, now: float) -> None:  # noqa: PLR0912  (one per kind)
    match signal.detail:
        case WorkerExited() as exited:
            _handle_worker_exited(state, signal, exited, now)
        case WorkerFailed() as failure:
            _handle_worker_failed(state, signal, failure, now)
        case WorkerJoined() as joined:
            _handle_worker_joined(state, signal, joined, now)
        case FirstStep(step=step):
            _handle_first_step(state, signal, step, now)
        case WorkerDone(step=step):
            _handle_worker_done(state, signal, step, now)
        case ShardSaved(shard=shard):
            record_saved_shard(state, shard)
        case ShardFailed() as failed:
            _handle_shard_failed(state, signal, failed, now)
        case ShardDelayed() as delayed:
            _handle_shard_delayed(state, signal, delayed, now)
        case RetentionDone() as done:
            checkpoint_finalization.handle_tidied(state, signal.agent, done, now)
        case StepRecomputed(digests=digests):
            corruption.handle_recomputed(state, signal, digests, now)
        case PartnerLost(partner=partner):
            _handle_partner_lost(state, signal, partner, now)
        case ZygoteLost(unfit=unfit):
            _handle_zygote_lost(state, signal.agent, unfit)
        case SourcesLost() as lost:
            _handle_sources_lost(state, signal, lost)
        case RankStalled(beat=beat):
            _handle_rank_stalled(state, signal, beat.step, now)
        case NodeUnwell(health=health):
            node_eviction.handle_health_signal(state, signal.agent, health)
        case GuardTripReported(trip=trip):
            guard_decisions.apply_guard_trip(state, signal.attempt, trip)
        case DamagedShard() as damaged:
            _handle_damaged_shard(state, signal, damaged, now)
        case other:
            assert_never(other)


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
        member.record_worker(signal.worker, signal.pid)
    return member


def _handle_worker_exited(
    state: CoreState, signal: Signal, detail: WorkerExited, now: float
) -> None:
    member = _find_member(state, signal)
    if member is None:
        state.add_evidence(
            f"worker {signal.worker} of {signal.agent} ended ({_exit_description(detail)})"
        )
        return
    if member.done:
        return  # it has finished all steps, and a saver process already has its shard
    step = detail.step or state.progress.committed
    description = (
        f"rank {member.rank} on {signal.agent} ended by {_exit_description(detail)} at step {step}"
    )
    ended_by, short = _ended_by(detail), detail.out_of_memory
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


def _ended_by(exited: WorkerExited) -> str:
    """See `Fault.ended_by`."""
    return exited.name if exited.exit_code is None else f"exit code {exited.exit_code}"


def _exit_description(exited: WorkerExited) -> str:
    why = f": {exited.why}" if exited.why else ""
    return f"{_ended_by(exited)}{why}".removeprefix(": ") or "an unknown cause"


def _handle_worker_failed(
    state: CoreState, signal: Signal, failure: WorkerFailed, now: float
) -> None:
    member = _member_of_attempt(state, signal)
    if member is None:
        return
    error = failure.error
    if error.kind is ErrorKind.CORRUPTION and failure.finding is not None:
        corruption.handle_corruption(state, signal, failure.finding, error, now)
        return
    cause = CAUSES[error.kind]
    if failure.trip is not None:
        guard_decisions.apply_guard_trip(state, signal.attempt, failure.trip)
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


def _handle_worker_joined(
    state: CoreState, signal: Signal, joined: WorkerJoined, now: float
) -> None:
    member = _member_of_attempt(state, signal)
    if member is None:
        return
    member.record_joined(dict(joined.phases_s))
    attempt_formation.advance(state, now)


def _handle_first_step(state: CoreState, signal: Signal, step: int, now: float) -> None:
    if _member_of_attempt(state, signal) is None or state.worlds.present is None:
        return
    record_committed_step(state, signal.attempt, step, now)


def record_committed_step(state: CoreState, attempt: int, step: int, now: float) -> None:
    """Record that a signal or a metric row shows a committed step of the attempt."""
    state.progress.record_step(attempt, step)
    world = state.worlds.present
    if world is None or attempt != world.attempt or step <= world.restored_step:
        return
    world.record_first_step(step, now)
    attempt_formation.advance(state, now)


def _handle_worker_done(state: CoreState, signal: Signal, step: int, now: float) -> None:
    member = _member_of_attempt(state, signal)
    if member is None:
        return
    member.record_done()
    state.ending.record_final_step(step)
    state.progress.record_step(signal.attempt, step)
    if state.timer.stage is Stage.FORMING:
        attempt_formation.advance(state, now)
    elif state.timer.stage in (Stage.RUNNING, Stage.FINISHING):
        attempt_formation.finish_if_complete(state, now)


def _handle_shard_failed(state: CoreState, signal: Signal, failed: ShardFailed, now: float) -> None:
    """Abandon a periodic checkpoint. For the last checkpoint, report a fault: it is worth another
    attempt."""
    step, message = failed.step, failed.message
    if not state.saves.abandon(signal.attempt, step):
        return  # another rank has already abandoned it
    if signal.attempt != state.worlds.attempt or state.timer.stage not in WITH_WORLD:
        return
    description = f"rank {signal.rank} on {signal.agent} could not save step {step}: {message}"
    stopping = state.ending.stop is not None and step >= (state.ending.final_step or 0)
    if failed.superseded or (step < state.config.steps and not stopping):
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


def _handle_shard_delayed(
    state: CoreState, signal: Signal, delayed: ShardDelayed, now: float
) -> None:
    """The remote tier refused a shard; the agent retries."""
    step = delayed.step
    description = f"rank {signal.rank} on {signal.agent} cannot save step {step}: {delayed.message}"
    remote_outage.open_outage(
        state,
        now,
        at=signal.at,
        description=description,
        step=step,
        rank=signal.rank,
        agent=signal.agent,
    )


def _handle_zygote_lost(state: CoreState, agent: str, unfit: str) -> None:
    if unfit:
        state.roster.mark_unfit(agent, unfit)
        state.add_evidence(f"agent {agent} cannot run workers any more: {unfit}")
    else:
        state.add_evidence(f"the zygote of agent {agent} died and is being restarted")


def _handle_partner_lost(state: CoreState, signal: Signal, partner: str, now: float) -> None:
    if _member_of_attempt(state, signal) is None or not partner:
        return
    handle_link_failed(state, signal.agent, partner, now)


def _handle_sources_lost(state: CoreState, signal: Signal, lost: SourcesLost) -> None:
    """Record the parts of a rank's state that could not be fetched; the rank is about to fail."""
    member = _member_of_attempt(state, signal)
    if member is not None:
        judgement.distrust_origins(state, member.restore, set(lost.origins), lost.message)


def _handle_damaged_shard(
    state: CoreState, signal: Signal, damaged: DamagedShard, now: float
) -> None:
    """A saved state failed its verification: never restore it again. During a restore this is also
    a fault."""
    message = damaged.message
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
    step, computed = damaged.step, damaged.attempt
    if step is not None and computed is not None and signal.rank is not None:
        bad = BadCopy(signal.agent, damaged.place, signal.rank, computed, step)
        judgement.record_bad_copy(state, bad, message)


def _handle_rank_stalled(state: CoreState, signal: Signal, step: int, now: float) -> None:
    member = _member_of_attempt(state, signal)
    if member is not None and not member.done:
        hang_suspicion.handle_rank_stalled(state, step, signal.at, now)
