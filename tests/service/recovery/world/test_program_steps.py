"""The steps of a program: it may begin with step 0, and may report none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.simulation.core_states import NOW, running_state

from holdfast_service.job_model.events.attempts import ProgramResumedEvent
from holdfast_service.job_model.events.progress import EndedEvent
from holdfast_service.policy.causes import Fault
from holdfast_service.recovery.core_state.effects import Emit
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.faults import rank_failures
from holdfast_service.recovery.nodes import situation
from holdfast_service.recovery.world import attempt_progress, outcome
from holdfast_workers.protocol.messages import UNKNOWN_STEP, ErrorKind, ErrorReport
from holdfast_workers.protocol.signals import Signal, WorkerDone, WorkerExited, WorkerFailed
from holdfast_workers.spec import TrainingSpec


def program() -> CoreState:
    """A program runs on all ranks, and has reported no step."""
    state = running_state(training=TrainingSpec(command=("python", "train.py")))
    state.progress.committed, state.progress.has_step = 0, False
    return state


def ended_at(state: CoreState) -> int | None:
    world = state.worlds.present
    assert world is not None
    for member in world.members.values():
        attempt_progress.record_done(state, member, world.attempt, WorkerDone(0), NOW)
    if state.worlds.present is not None:
        outcome.conclude(state, NOW)
    (end,) = (
        effect.event
        for effect in state.take_effects()
        if isinstance(effect, Emit) and isinstance(effect.event, EndedEvent)
    )
    return end.step


def test_step_0_is_the_first_step_of_a_program_that_counts_from_0() -> None:
    state = program()
    attempt_progress.record_committed_step(state, 1, 0, NOW)
    world = state.worlds.present
    assert world is not None and world.first_step == 0
    emitted = [effect.event for effect in state.take_effects() if isinstance(effect, Emit)]
    [told] = [event for event in emitted if isinstance(event, ProgramResumedEvent)]
    assert (told.attempt, told.first_step, told.steps_lost) == (1, 0, None)
    assert ended_at(state) == 0


def test_a_program_that_has_reported_no_step_has_none_at_its_end() -> None:
    state = program()
    attempt_progress.record_reached_step(state, 1, 0, NOW)  # as its agent sees it
    world = state.worlds.present
    assert world is not None and world.first_step is None and not state.knows_step
    assert ended_at(state) is None


def test_the_state_that_a_rank_was_offered_is_no_step_that_its_program_reports() -> None:
    state = program()
    world = state.worlds.present
    assert world is not None
    attempt_progress.record_left(state, world.members[0], 1, 18, NOW)
    assert world.first_step is None and not state.progress.reports_steps
    assert state.progress.committed == 18


def failed(state: CoreState, detail: WorkerExited | WorkerFailed) -> Fault:
    """The fault of rank 1 as it is judged."""
    world = state.worlds.present
    assert world is not None
    member = world.members[1]
    told = Signal(
        detail, "n0", member.incarnation, 1, NOW, world.attempt, member.rank, member.worker
    )
    if isinstance(detail, WorkerExited):
        (fault,) = rank_failures.handle_exit(state, told, member, detail)
    else:
        (fault,) = rank_failures.handle_failure(state, told, member, detail)
    return replace(fault, reached=state.reached)


ENDS = [
    WorkerExited(name="SIGKILL"),
    WorkerFailed(ErrorReport(ErrorKind.USER, "OSError", "away", "", UNKNOWN_STEP)),
]


@pytest.mark.parametrize("detail", ENDS)
def test_a_fault_of_a_program_without_steps_names_no_step(
    detail: WorkerExited | WorkerFailed,
) -> None:
    state = program()
    fault = failed(state, detail)
    assert "at step" not in fault.what
    assert situation.assess(state, (fault,), NOW).step is None


@pytest.mark.parametrize("detail", ENDS)
def test_a_fault_of_a_program_names_no_step_that_later_rows_would_contradict(
    detail: WorkerExited | WorkerFailed,
) -> None:
    state = program()
    attempt_progress.record_committed_step(state, 1, 12, NOW)
    fault = failed(state, detail)
    assert "12" not in fault.what
    assert situation.assess(state, (fault,), NOW).step == 12
