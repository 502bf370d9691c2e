"""Failures of ranks, as their signals describe them: the cause, and the fault.

A worker or a saved state that the failure discredits is excluded here. What the fault leads to is
decided by `judgement.py`.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_service.job_model.events.checkpoints import CheckpointBadEvent
from holdfast_service.placement.rank_assignment import format_ranks
from holdfast_service.placement.restore_points import BadCopy
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.recovery.core_state.stage_timer import WITH_WORLD, Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.core_state.worlds import Member
from holdfast_service.recovery.faults import corruption, guard_decisions, judgement
from holdfast_service.recovery.world import attempt_progress
from holdfast_workers.errors import short_error
from holdfast_workers.protocol.messages import UNKNOWN_STEP, ErrorKind, ErrorReport, Tier
from holdfast_workers.protocol.signals import (
    DamagedShard,
    ShardFailed,
    Signal,
    WorkerExited,
    WorkerFailed,
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
    ErrorKind.DATA: Cause.DATA_UNAVAILABLE,
    ErrorKind.INTERNAL: Cause.INTERNAL_ERROR,
    ErrorKind.CORRUPTION: Cause.INTERNAL_ERROR,  # reported without a finding
}


def handle_exit(
    state: CoreState, signal: Signal, member: Member | None, exited: WorkerExited
) -> tuple[Fault, ...]:
    """A process ended. It is a fault if it had a rank that was not done yet."""
    ending = _exit_description(exited)
    if member is None:
        state.add_evidence(f"worker {signal.worker} of {signal.agent} ended ({ending})")
        return ()
    if member.has_stopped:
        return ()  # its last state is with a saver process, or in the memory of its node
    step = exited.step or state.progress.committed
    if state.config.runs_program:  # not each of its ranks shows steps
        step = max(step, state.progress.committed)
    # The newest step of a program may be known only later: a number would contradict what follows.
    where = "" if state.config.runs_program else f" at step {step}"
    description = f"rank {member.rank} on {signal.agent} ended by {ending}{where}"
    cause = Cause.PREEMPTED if exited.name == "SIGTERM" else Cause.WORKER_CRASH
    if exited.out_of_memory:
        cause, description = Cause.OUT_OF_MEMORY, f"{description}: {exited.out_of_memory}"
    fault = _fault(state, signal, member, cause, description, step=step)
    return (replace(fault, signal=exited.name, exit_code=exited.exit_code),)


def handle_failure(
    state: CoreState, signal: Signal, member: Member, failure: WorkerFailed
) -> tuple[Fault, ...]:
    """A rank left its attempt with an error; its process lives."""
    error = failure.error
    if error.kind is ErrorKind.CORRUPTION and failure.finding is not None:
        return corruption.handle_corruption(state, signal, failure.finding, error)
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
    step, where = error.step, f"at step {error.step}"
    if step == UNKNOWN_STEP:
        step = state.reached or 0
        where = "" if step else "before any step was shown"
    failed = " ".join(filter(None, ("failed", where, "with")))
    description = f"rank {member.rank} on {signal.agent} {failed} {error.type}: {summary}"
    return (_fault(state, signal, member, cause, description, step=step, error=error),)


def handle_failed_shard(state: CoreState, signal: Signal, failed: ShardFailed) -> tuple[Fault, ...]:
    """Abandon a periodic checkpoint. The last checkpoint is worth another attempt: its failure is
    a fault."""
    step, message = failed.step, failed.message
    if not state.saves.abandon(signal.attempt, step):
        return ()  # another rank has already abandoned it
    if signal.attempt != state.worlds.attempt or state.timer.stage not in WITH_WORLD:
        return ()
    description = f"rank {signal.rank} on {signal.agent} could not save step {step}: {message}"
    stopping = state.ending.stop is not None and step >= (state.ending.final_step or 0)
    if failed.superseded or (step < state.ending.end_step and not stopping):
        state.emit(CheckpointBadEvent(step=step, message=description))
        return ()
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
    return (fault,)


def handle_damaged_shard(
    state: CoreState, signal: Signal, member: Member | None, damaged: DamagedShard
) -> tuple[Fault, ...]:
    """A saved state failed its verification: never restore it again. During a restore this is also
    a fault."""
    message = damaged.message
    if (
        member is not None
        and member.restore.tier is not Tier.RESHARD  # another source may have it whole
        and not member.joined
        and state.timer.stage in (Stage.FORMING, Stage.GATHERING)
    ):
        judgement.distrust_source(state, member.rank, for_ever=True, why=message)
        description = f"rank {member.rank} on {signal.agent} restored a bad state: {message}"
        step = member.restore.step
        return (_fault(state, signal, member, Cause.BAD_STATE, description, step=step),)
    if damaged.step is not None and damaged.attempt is not None and signal.rank is not None:
        bad = BadCopy(signal.agent, damaged.place, signal.rank, damaged.attempt, damaged.step)
        judgement.record_bad_copy(state, bad, message)
    return ()


def handle_forming_deadline(state: CoreState, now: float) -> tuple[Fault, ...]:
    """A step proves that all ranks joined, even if signals were lost. Without one, a rank
    hangs."""
    world = state.worlds.present
    assert world is not None
    if world.first_step is not None or world.evaluates_first:
        for member in world.members.values():
            member.record_joined()
        attempt_progress.advance(state, now)
        return ()
    absent = [m for m in world.members.values() if not (m.joined or m.has_stopped)]
    for member in absent:
        if member.worker is not None:
            state.roster.exclude_worker(member.worker)
    ranks = format_ranks([member.rank for member in absent])
    description = f"{ranks} did not join attempt {world.attempt} in time"
    if not absent:
        description = (
            f"attempt {world.attempt} committed no step in time after all ranks had joined"
        )
    fault = Fault(
        Cause.NO_PROGRESS,
        attempt=world.attempt,
        at=now,
        what=description,
        rank=absent[0].rank if absent else None,
        agent=absent[0].agent if absent else None,
        worker=absent[0].worker if absent else None,
        step=world.restored_step,
        certain=False,
    )
    return (fault,)


def _exit_description(exited: WorkerExited) -> str:
    end = exited.name if exited.exit_code is None else f"exit code {exited.exit_code}"
    return ": ".join(filter(None, (end, exited.why))) or "an unknown cause"


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


def _fault(
    state: CoreState,
    signal: Signal,
    member: Member,
    cause: Cause,
    description: str,
    *,
    step: int,
    error: ErrorReport | None = None,
) -> Fault:
    return Fault(
        cause,
        attempt=state.worlds.attempt,
        at=signal.at,
        what=description,
        rank=member.rank,
        worker=signal.worker,
        agent=signal.agent,
        step=step,
        error=error,
    )
