"""Lost signals, reconstructed from the polled state of an agent's workers.

Signals are calls and may be lost; the supervisor also polls each agent for its workers. A signal
that two consecutive polls show to be missing is handled as if it had arrived. One poll proves
nothing: its answer may be older than a signal that is still on its way. Saved and failed shards are
final, so one poll is enough for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_service.recovery.core_state.inputs import WorkersPolled
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.core_state.worlds import AttemptWorld, Member
from holdfast_workers.protocol.answers import WorkerReport
from holdfast_workers.protocol.messages import WorkerState
from holdfast_workers.protocol.signals import (
    FailedShard,
    FirstStep,
    ShardFailed,
    Signal,
    SignalDetail,
    WorkerDone,
    WorkerExited,
    WorkerLeft,
)


def record_polled_shards(state: CoreState, event: WorkersPolled, now: float) -> list[Signal]:
    """Record the saved shards that a poll lists. Returns the signals of its failed shards."""
    if not state.roster.is_current(event.agent, event.incarnation):
        return []
    state.saves.record_shards(event.shards, state.progress.line, state.worlds)
    return [_failed_signal(event, shard, now) for shard in _failures_of_last_step(state, event)]


def find_missed_signals(state: CoreState, event: WorkersPolled, now: float) -> list[Signal]:
    """Compare an agent's polled workers with the known state. Returns the signals that are missing
    for the second time."""
    world = state.worlds.present
    if world is None or state.timer.stage not in (Stage.FORMING, Stage.RUNNING, Stage.FINISHING):
        state.roster.record_missed_signals(event.agent, frozenset())
        return []
    seen = {report.worker: report for report in event.workers}
    members = [
        member
        for member in world.members.values()
        if (member.agent, member.incarnation) == (event.agent, event.incarnation)
    ]
    for member in members:
        _learn_worker(member, event.workers, world.attempt)
    missing = {
        signal.worker: signal
        for member in members
        for signal in [_missed_signal(member, seen, world, now)]
        if signal is not None
    }
    before = state.roster.record_missed_signals(
        event.agent, frozenset((signal.kind, name) for name, signal in missing.items())
    )
    return [signal for name, signal in missing.items() if (signal.kind, name) in before]


def _learn_worker(member: Member, workers: Sequence[WorkerReport], attempt: int) -> None:
    """The name of a forked process, if all signals that named it were lost."""
    for report in workers:
        if member.worker is None and (report.attempt, report.rank) == (attempt, member.rank):
            member.record_worker(report.worker, report.pid)


def _missed_signal(  # noqa: PLR0911  (one per signal)
    member: Member, seen: dict[str, WorkerReport], world: AttemptWorld, now: float
) -> Signal | None:
    """The signal that the member's worker should have sent, given its polled state."""
    if member.worker is None or member.has_stopped:
        return None
    attempt, report = world.attempt, seen.get(member.worker)
    if report is None:
        why = "the agent does not list it any more, and no signal reported its end"
        return _build_signal(member, WorkerExited(why=why), attempt, now)
    if report.attempt != attempt:
        return None
    if report.failure is not None:
        return _build_signal(member, report.failure, attempt, now)
    match report.state:
        case WorkerState.DONE:
            return _build_signal(member, WorkerDone(report.step, report.early), attempt, now)
        case WorkerState.LEFT:
            return _build_signal(member, WorkerLeft(report.step), attempt, now)
        case WorkerState.TRAINING if report.evaluates_first and world.computed_at is None:
            first = FirstStep(report.step + 1, now, committed=False)
            return _build_signal(member, first, attempt, now)
        case _:
            return None


def _failures_of_last_step(state: CoreState, event: WorkersPolled) -> list[FailedShard]:
    """The failures that matter without their signal: FINISHING waits for the last checkpoint, and
    nothing waits for an earlier one."""
    if state.timer.stage is not Stage.FINISHING:
        return []
    last = state.ending.last_step
    return [shard for shard in event.failed_shards if shard.step >= last]


def _failed_signal(event: WorkersPolled, shard: FailedShard, now: float) -> Signal:
    return Signal(
        detail=ShardFailed(shard.step, shard.message, shard.superseded),
        agent=event.agent,
        incarnation=event.incarnation,
        seq=0,
        at=now,
        attempt=shard.attempt,
        rank=shard.rank,
    )


def _build_signal(member: Member, detail: SignalDetail, attempt: int, now: float) -> Signal:
    return Signal(
        detail=detail,
        agent=member.agent,
        incarnation=member.incarnation,
        seq=0,
        at=now,
        attempt=attempt,
        rank=member.rank,
        worker=member.worker,
        pid=member.pid,
    )
