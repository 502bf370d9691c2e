"""The primary fault of several, the blamed node, and the recognition of repeated errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.policy.causes import (
    Cause,
    Fault,
    blames_node,
    error_mark_of,
    is_external,
    is_missing_module,
    is_repeat_of,
    primary_fault,
)
from holdfast_workers.protocol.messages import UNKNOWN_STEP, ErrorKind, ErrorReport

TRACEBACK = """Traceback (most recent call last):
  File "/code/train.py", line 12, in main
    step(batch)
  File "/code/train.py", line {line}, in step
    raise ValueError("no")
ValueError: no
"""


def fault(cause: Cause, at: float = 0.0, rank: int = 0) -> Fault:
    return Fault(cause, 1, at, f"{cause}", rank=rank, agent="n0", step=10)


def crash(end: str | int) -> Fault:
    """By a signal, or with an exit code."""
    crashed = fault(Cause.WORKER_CRASH)
    return replace(crashed, signal=end) if isinstance(end, str) else replace(crashed, exit_code=end)


def raised(message: str = "no", step: int = 10, line: int = 40, type_: str = "ValueError") -> Fault:
    error = ErrorReport(ErrorKind.USER, type_, message, TRACEBACK.format(line=line), step)
    return Fault(Cause.USER_ERROR, 1, 0.0, "raised", rank=0, agent="n0", step=step, error=error)


def test_a_process_death_is_the_primary_fault_over_earlier_errors_of_its_peers() -> None:
    faults = (fault(Cause.COMMUNICATION, 1.0), fault(Cause.WORKER_CRASH, 2.0, rank=3))
    assert primary_fault(faults).rank == 3


def test_errors_match_by_type_step_message_and_location_ignoring_numbers() -> None:
    first = error_mark_of(raised("rank 0 at 0x7f12 lost 12.5"))
    assert first == error_mark_of(raised("rank 3 at 0x7aa0 lost 1"))
    assert first is not None
    assert first.location == "/code/train.py:40 in step"
    for other in (raised(step=11), raised(line=41), raised("yes"), raised(type_="KeyError")):
        assert error_mark_of(other) != error_mark_of(raised())


def test_a_process_end_is_a_repeat_if_no_later_step_was_reached() -> None:
    for left in (crash(3), fault(Cause.OUT_OF_MEMORY)):
        before = error_mark_of(left)
        assert is_repeat_of(before, replace(left, rank=2))
        assert is_repeat_of(before, replace(left, step=0)), "before it had joined"
        assert not is_repeat_of(before, replace(left, step=11))
        assert not is_repeat_of(None, left)
        assert not is_repeat_of(before, crash(4))
    assert error_mark_of(crash("SIGKILL")) is None


def test_an_exception_is_a_repeat_only_at_the_same_step() -> None:
    before = error_mark_of(raised())
    assert is_repeat_of(before, raised())
    assert not is_repeat_of(before, raised(step=9)) and not is_repeat_of(before, raised("yes"))


@pytest.mark.parametrize("left", [crash(3), fault(Cause.OUT_OF_MEMORY)])
def test_a_program_that_ends_before_its_first_step_repeats_no_end_at_a_later_one(
    left: Fault,
) -> None:
    late, early = replace(left, reached=10), replace(left, reached=None)
    assert not is_repeat_of(error_mark_of(late), early, is_program=True)
    assert is_repeat_of(error_mark_of(late), early), "a recipe shows each step"
    assert is_repeat_of(error_mark_of(early), early, is_program=True)
    assert is_repeat_of(error_mark_of(late), late, is_program=True)


def unseen(reached: int | None, message: str = "no", line: int = 40) -> Fault:
    """An error of a rank that shows no steps, in a world that had shown `reached`."""
    return replace(raised(message, UNKNOWN_STEP, line), reached=reached)


def test_an_exception_of_a_rank_without_steps_is_a_repeat_where_its_world_has_come_as_far() -> None:
    before = error_mark_of(unseen(60))
    assert is_repeat_of(before, unseen(60)), "it went on from its checkpoint to the same place"
    assert not is_repeat_of(before, unseen(None)), "it has not come as far"
    assert is_repeat_of(error_mark_of(unseen(None)), unseen(None))
    assert not is_repeat_of(before, unseen(65))
    assert not is_repeat_of(before, unseen(30)), "it had passed this place"
    assert not is_repeat_of(before, unseen(60, "yes"))
    assert not is_repeat_of(before, unseen(60, line=41))


def test_a_missing_module_is_told_from_one_that_is_away_later() -> None:
    error = ErrorReport(ErrorKind.USER, "ModuleNotFoundError", "No module named 'x'", "", 0)
    first = replace(raised("no"), error=error, attempt=1, reached=None)
    assert is_missing_module(first)
    assert not is_missing_module(replace(first, attempt=2))
    assert not is_missing_module(replace(first, reached=3))
    assert not is_missing_module(replace(first, error=replace(error, type="ImportError")))
    assert not is_missing_module(replace(first, error=None))


@given(
    step=st.integers(UNKNOWN_STEP, 100),
    reached=st.none() | st.integers(0, 100),
    other=st.none() | st.integers(0, 100),
)
def test_the_same_error_at_the_same_place_is_a_repeat_and_one_further_on_is_not(
    step: int, reached: int | None, other: int | None
) -> None:
    once = replace(raised(step=step), reached=reached)
    assert is_repeat_of(error_mark_of(once), once)
    later = replace(once, reached=other)
    if step != UNKNOWN_STEP:
        assert is_repeat_of(error_mark_of(once), later), "its rank is at the same step"
    elif other != reached:
        assert not is_repeat_of(error_mark_of(once), later)


@pytest.mark.parametrize(
    ("accused", "blamed"),
    [
        (crash("SIGSEGV"), True),
        (crash("SIGABRT"), False),  # a watchdog gave up on its peers
        (crash("SIGKILL"), False),  # sent from outside to that process
        (crash(3), False),
        (fault(Cause.HANG), True),
        (fault(Cause.CORRUPTION), True),
        (fault(Cause.PREEMPTED), False),  # node eligibility considers it while it lasts
        (fault(Cause.USER_ERROR), False),
        (fault(Cause.COMMUNICATION), False),
        (Fault(Cause.HANG, 1, 0.0, "no rank was named"), False),
    ],
)
def test_a_node_is_blamed_only_for_faults_it_may_have_caused(accused: Fault, blamed: bool) -> None:
    assert blames_node(accused) is blamed


def test_an_abort_is_the_programs_own_act_and_predicts_the_next_attempt() -> None:
    assert not is_external(crash("SIGABRT"))
    assert is_external(crash("SIGKILL"))
