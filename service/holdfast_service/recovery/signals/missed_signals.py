"""What a lost signal should have said, found out by comparing the workers that an agent has.

Signals are calls, and may be lost; an agent tells its workers whenever it is asked. What was to be
heard and was not at two looks in a row is taken as heard: an answer may be older than a signal.
"""

from __future__ import annotations

from holdfast_service.recovery.core_state.inputs import WorkersSeen
from holdfast_service.recovery.core_state.state import Member, Stage, State
from holdfast_service.recovery.signals import signal_handlers
from holdfast_workers.protocol.messages import Signal, SignalKind, WorkerReport, WorkerState


def workers_seen(state: State, given: WorkersSeen, now: float) -> None:
    """An agent's workers, and what it has saved, as they are."""
    if state.roster.is_current(given.agent, given.incarnation):
        for shard in given.shards:
            signal_handlers.shard_saved(
                state, int(shard["attempt"]), int(shard["rank"]), dict(shard)
            )
    world = state.world
    if world is None or state.stage not in (Stage.FORMING, Stage.RUNNING, Stage.FINISHING):
        state.unheard.pop(given.agent, None)
        return
    seen = {one.worker: one for one in given.workers}
    found = {
        signal.worker: signal
        for member in world.members.values()
        if (member.agent, member.incarnation) == (given.agent, given.incarnation)
        for signal in [_unheard(member, seen, world.attempt, now)]
        if signal is not None
    }
    before = state.unheard.get(given.agent, frozenset())
    state.unheard[given.agent] = frozenset((one.kind, name) for name, one in found.items())
    twice = [signal for name, signal in found.items() if (signal.kind, name) in before]
    signal_handlers.hear_all(state, twice, now)


def _unheard(
    member: Member, seen: dict[str, WorkerReport], attempt: int, now: float
) -> Signal | None:
    """The signal that the member's worker should have sent, by what is seen of it."""
    if member.worker is None or member.done:
        return None
    one = seen.get(member.worker)
    if one is None:
        why = "it was gone when its agent was asked, and nobody had heard of its end"
        return _signal(member, SignalKind.WORKER_EXITED, attempt, now, why=why)
    if one.attempt != attempt:
        return None
    if one.failure is not None:
        return _signal(member, SignalKind.WORKER_FAILED, attempt, now, **one.failure)
    if one.state is WorkerState.DONE:
        return _signal(member, SignalKind.WORKER_DONE, attempt, now, step=one.step)
    return None


def _signal(member: Member, kind: SignalKind, attempt: int, now: float, **detail: object) -> Signal:
    return Signal(
        kind=kind,
        agent=member.agent,
        incarnation=member.incarnation,
        seq=0,
        at=now,
        attempt=attempt,
        rank=member.rank,
        worker=member.worker,
        pid=member.pid,
        detail=detail,
    )
