"""What counts as progress of a job: a step beyond all steps of its present line."""

from __future__ import annotations

from holdfast_service.policy.causes import ErrorMark
from holdfast_service.recovery.core_state.progress import Progress
from holdfast_workers.protocol.messages import UNKNOWN_STEP
from holdfast_workers.training.skipped_windows import Ledger


def stuck_after(step: int, attempts: int) -> Progress:
    """A job that committed `step`, and of which so many attempts then made no step."""
    progress = Progress(Ledger(()))
    progress.start_attempt(1, 0)
    progress.record_step(1, step)
    for _ in range(attempts):
        progress.count_lack_of_progress()
    return progress


def test_a_step_that_was_committed_before_is_no_progress() -> None:
    progress = stuck_after(5, attempts=2)
    progress.start_attempt(2, 5)
    for step in (4, 5):
        progress.record_step(2, step)
    assert (progress.floor, progress.without_progress) == (5, 2)


def test_a_new_step_ends_the_lack_of_progress() -> None:
    progress = stuck_after(5, attempts=2)
    progress.start_attempt(2, 5)
    progress.record_step(2, 6)
    assert (progress.floor, progress.without_progress) == (6, 0)


def test_a_step_of_an_attempt_before_the_last_is_ignored() -> None:
    progress = stuck_after(5, attempts=1)
    progress.start_attempt(2, 5)
    progress.record_step(1, 9)
    assert (progress.committed, progress.without_progress) == (5, 1)


def test_beyond_an_older_restored_state_each_step_is_progress_again() -> None:
    progress = stuck_after(9, attempts=2)
    progress.start_attempt(2, 3)
    progress.record_step(2, 5)
    assert (progress.floor, progress.without_progress) == (5, 0)


def test_an_error_is_new_once_another_attempt_has_gone_beyond_its_step() -> None:
    progress = stuck_after(5, attempts=0)
    progress.remember_error(ErrorMark("ValueError", UNKNOWN_STEP, reached=5), 1)
    progress.record_step(1, 6)  # known late
    progress.start_attempt(2, 0)
    progress.record_step(2, 6)
    progress.start_attempt(3, 0)
    assert progress.mark == ErrorMark("ValueError", UNKNOWN_STEP, reached=6)
    progress.record_step(3, 7)
    progress.start_attempt(4, 0)
    assert progress.mark is None


def test_only_a_step_beyond_its_restored_one_makes_an_attempt_replace_the_steps_before_it() -> None:
    progress = stuck_after(9, attempts=0)
    progress.start_attempt(2, 5)
    progress.record_step(2, 5)
    assert progress.line.contains(1, 9), "attempt 2 has not run: the steps of attempt 1 stand"
    progress.record_step(2, 6)
    assert not progress.line.contains(1, 9)
    assert progress.line.contains(2, 6)
