"""Stopping on request: one more step that all ranks agree on, then its checkpoint, then the end.

Promises: what was computed is given up only when the deadline is over, and the end says which step
is durable and what was lost; a job that is to be paused and has nothing durable is not stopped.
A fault while stopping is recovered from like any other, within the same deadline.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_service.job_model.supervisor_protocol import EventKind, Phase, StopKind, Stopping
from holdfast_service.policy.causes import GiveUp
from holdfast_service.recovery.core_state.effects import Finish
from holdfast_service.recovery.core_state.inputs import StopRequested
from holdfast_service.recovery.core_state.state import Stage, State
from holdfast_service.recovery.world import attempt_formation, outcome, stop_proof


def requested(state: State, given: StopRequested, now: float) -> None:
    """Asked for the first time, again (which may only hasten it), or a cancel of a paused job."""
    before = state.stop
    wanted = Stopping(given.kind, given.reason, given.deadline)
    if before is not None:
        if before.kind is StopKind.CANCEL:
            wanted = replace(wanted, kind=before.kind, reason=before.reason)
        wanted = replace(wanted, deadline=min(before.deadline, wanted.deadline))
    state.stop = wanted
    if wanted != before:
        state.emit(EventKind.JOB_STOPPING, step=state.committed, **wanted.data())
    if now >= wanted.deadline or not _computed(state):
        give_up(state, now)
    elif state.stage is Stage.RUNNING:
        begin(state, now)
    elif state.stage is Stage.FINISHING and state.final_step is None:
        _ask(state)  # the first time, it may not have got through


def begin(state: State, now: float) -> None:
    """The world runs: let it make its last step."""
    assert state.stop is not None
    state.show(Phase.FINISHING)
    state.enter(Stage.FINISHING, now, max(0.0, state.stop.deadline - now))
    _ask(state)


def give_up(state: State, now: float, why: str = "") -> None:
    """No more time, or nothing to wait for: the newest durable state counts.

    A pause without one is undone: the work is worth more than the pause.
    """
    stop = state.stop
    assert stop is not None
    durable = state.saves.newest(state.line)
    if stop.kind is StopKind.PAUSE and durable is None and _computed(state):
        _undo(state, now, why)
        return
    outcome.stopped(state, now, durable, why)


def settles(state: State, verdict: GiveUp, now: float) -> bool:
    """Whether a job that cannot be recovered ends as it was asked to, rather than by the fault."""
    stop = state.stop
    if stop is None:
        return False
    if stop.kind is StopKind.PAUSE and state.saves.newest(state.line) is None:
        return False
    give_up(state, now, verdict.message)
    return True


def _computed(state: State) -> bool:
    """Whether this job, on this cluster, may have computed anything that is not durable. Until
    what a former supervisor left is taken over, only the agents know."""
    return state.committed > 0 or state.stage is Stage.ADOPTING


def _ask(state: State) -> None:
    world = state.world
    assert world is not None
    for agent in sorted(world.hosts()):
        record = state.roster.record(agent)
        if record is not None:
            state.ask(Finish(agent, world.attempt, record.incarnation))


def _undo(state: State, now: float, why: str) -> None:
    """The job goes on from memory, as a new attempt where the ranks have stopped."""
    stop = state.stop
    assert stop is not None
    reason = why or "the last state did not reach the remote tier in time, and nothing else has"
    state.emit(EventKind.STOP_UNDONE, wanted=stop.kind.value, reason=reason, step=state.committed)
    state.stop = None
    if state.stage is Stage.FINISHING and state.final_step == state.config.steps:
        state.enter(Stage.FINISHING, now, state.config.finish_timeout_s)  # it was the end anyway
        return
    state.final_step = None
    if state.stage is not Stage.FINISHING:
        return
    stop_proof.is_needed(state, state.world.lives() if state.world is not None else ())
    outcome.end_attempt(state, f"the {stop.kind.value} was undone: {reason}")
    state.show(Phase.RECOVERING)
    attempt_formation.open_attempt(state, now)
