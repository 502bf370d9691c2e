"""Graceful stop on request: one more agreed step, then its checkpoint, then the end of the job.

Invariants: computed steps are given up only after the deadline. The ENDED event states which step
is durable and what was lost. A pause without any durable state is undone, and the job continues.
A fault during the stop is recovered from like any other, within the same deadline.
"""

from __future__ import annotations

from holdfast_service.job_model.events.progress import JobStoppingEvent, StopUndoneEvent
from holdfast_service.job_model.lifecycle import Phase, StopKind, StopOrder
from holdfast_service.policy.causes import GiveUp
from holdfast_service.recovery.core_state.inputs import StopRequested
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.world import attempt_formation, outcome
from holdfast_workers.protocol.commands import Finish


def handle_stop_request(state: CoreState, event: StopRequested, now: float) -> None:
    """Handle a stop request: the first one, a repeated one (which can only bring the deadline
    forward), or a cancel during a pause."""
    changed = state.ending.request(StopOrder(event.kind, event.reason, event.deadline))
    wanted = state.ending.stop
    assert wanted is not None
    if changed is not None:
        step = state.progress.committed if state.knows_step else None
        state.emit(JobStoppingEvent.of(wanted, step))
    if now >= wanted.deadline or not _may_have_progress(state):
        end_by_deadline(state, now)
    elif state.timer.stage is Stage.RUNNING:
        begin_stop(state, now)
    elif state.timer.stage is Stage.FINISHING and state.ending.final_step is None:
        _request_finish(state)  # the first request may have been lost


def begin_stop(state: CoreState, now: float) -> None:
    """Order the running world to commit its last step, once it has committed one."""
    assert state.ending.stop is not None
    world = state.worlds.present
    if world is not None and world.evaluates_first:
        return
    state.set_phase(Phase.FINISHING)
    state.enter(Stage.FINISHING, now, max(0.0, state.ending.stop.deadline - now))
    _request_finish(state)


def end_by_deadline(state: CoreState, now: float, why: str = "") -> None:
    """End with the newest durable state: the deadline is over, or there is nothing to wait for.

    A pause without a durable state is undone: the computed steps are worth more than the pause.
    """
    stop = state.ending.stop
    assert stop is not None
    durable = state.saves.newest(state.progress.line)
    own = state.config.runs_program  # what it saved itself is not known here
    if stop.kind is StopKind.PAUSE and durable is None and not own and _may_have_progress(state):
        _undo_pause(state, now, why)
        return
    outcome.end_as_stopped(state, now, durable, why)


def ends_as_requested(state: CoreState, verdict: GiveUp, now: float) -> bool:
    """End an unrecoverable job as requested instead of by the fault. False if not possible."""
    stop = state.ending.stop
    if stop is None:
        return False
    saved = state.config.runs_program or state.saves.newest(state.progress.line) is not None
    if stop.kind is StopKind.PAUSE and not saved:
        return False
    end_by_deadline(state, now, verdict.message)
    return True


def _may_have_progress(state: CoreState) -> bool:
    """Whether this job may have computed steps that are not durable. While a former supervisor's
    attempt is being adopted, only the agents know."""
    started = state.progress.committed > 0 or (
        state.config.runs_program and state.worlds.present is not None
    )
    return started or state.timer.stage is Stage.ADOPTING


def _request_finish(state: CoreState) -> None:
    world = state.worlds.present
    assert world is not None
    for agent in sorted(world.hosts()):
        record = state.roster.find(agent)
        if record is not None:
            state.request(Finish(agent, world.attempt, record.incarnation))


def _undo_pause(state: CoreState, now: float, why: str) -> None:
    """Undo a pause: the job continues from memory, as a new attempt if its ranks have stopped."""
    stop = state.ending.stop
    assert stop is not None
    reason = why or (
        "the last state did not reach the remote tier in time, and it holds no earlier state"
    )
    step = state.progress.committed
    state.emit(StopUndoneEvent(wanted=stop.kind, reason=reason, step=step))
    state.ending.undo()
    if state.timer.stage is Stage.FINISHING and state.ending.final_step == state.ending.end_step:
        state.enter(
            Stage.FINISHING, now, state.config.spec.timeouts.finish_s
        )  # this was the last step anyway
        return
    state.ending.continue_training()
    if state.timer.stage is not Stage.FINISHING:
        return
    world = state.worlds.present
    state.fencing.require_proof(world.incarnations() if world is not None else ())
    outcome.end_attempt(state, f"the {stop.kind.value} was undone: {reason}")
    state.set_phase(Phase.RECOVERING)
    attempt_formation.open_attempt(state, now)
