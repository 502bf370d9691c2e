"""The verdict on a condemned attempt."""

from __future__ import annotations

from holdfast_service.policy import Cause, ErrorMark, Fault, GiveUp, Reform, judge, primary
from holdfast_workers.messages import ErrorKind, WorkerError


def fault(cause: Cause, at: float = 0.0, rank: int = 0, step: int = 10) -> Fault:
    error = None
    if cause is Cause.USER_ERROR:
        error = WorkerError(ErrorKind.USER, "ValueError", "no", "Traceback", step)
    return Fault(cause, 1, at, f"{cause} of rank {rank}", rank=rank, step=step, error=error)


def verdict(*faults: Fault, failures=(100.0,), remembered=None, max_failures: int = 3):
    return judge(
        faults,
        failures=failures,
        remembered=remembered,
        now=100.0,
        max_failures=max_failures,
        window_s=60.0,
    )


def test_a_death_explains_what_its_peers_felt_before_it_was_seen() -> None:
    faults = (fault(Cause.COMMUNICATION, 1.0), fault(Cause.WORKER_CRASH, 2.0, rank=3))
    assert primary(faults).rank == 3


def test_a_users_error_is_tried_again_once_and_then_ends_the_job() -> None:
    first = verdict(fault(Cause.USER_ERROR))
    assert isinstance(first, Reform)
    assert first.mark == ErrorMark("ValueError", 10)
    again = verdict(fault(Cause.USER_ERROR), remembered=first.mark)
    assert isinstance(again, GiveUp)
    assert (again.code, again.traceback) == ("user_error", "Traceback")


def test_the_same_error_at_another_step_is_another_error() -> None:
    assert isinstance(
        verdict(fault(Cause.USER_ERROR, step=11), remembered=ErrorMark("ValueError", 10)), Reform
    )


def test_a_crash_that_repeats_at_the_same_step_is_ended_by_the_budget_alone() -> None:
    crash = fault(Cause.WORKER_CRASH)
    assert isinstance(verdict(crash, failures=(80.0, 90.0, 100.0)), Reform)
    over = verdict(crash, failures=(70.0, 80.0, 90.0, 100.0))
    assert isinstance(over, GiveUp)
    assert over.code == "too_many_failures"
    assert crash.what in over.message


def test_failures_outside_the_window_are_forgiven() -> None:
    assert isinstance(
        verdict(fault(Cause.WORKER_CRASH), failures=(10.0, 20.0, 30.0, 100.0)), Reform
    )
