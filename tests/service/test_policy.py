"""Which fault explains the others, whom it blames, and when it is the same again."""

from __future__ import annotations

import pytest

from holdfast_service.policy import Cause, Fault, blames_node, mark_of, primary
from holdfast_workers.messages import ErrorKind, WorkerError

TRACEBACK = """Traceback (most recent call last):
  File "/code/train.py", line 12, in main
    step(batch)
  File "/code/train.py", line {line}, in step
    raise ValueError("no")
ValueError: no
"""


def fault(cause: Cause, at: float = 0.0, rank: int = 0, ended_by: str = "") -> Fault:
    return Fault(cause, 1, at, f"{cause}", rank=rank, agent="n0", step=10, ended_by=ended_by)


def raised(message: str = "no", step: int = 10, line: int = 40, type_: str = "ValueError") -> Fault:
    error = WorkerError(ErrorKind.USER, type_, message, TRACEBACK.format(line=line), step)
    return Fault(Cause.USER_ERROR, 1, 0.0, "raised", rank=0, agent="n0", step=step, error=error)


def test_a_death_explains_what_its_peers_felt_before_it_was_seen() -> None:
    faults = (fault(Cause.COMMUNICATION, 1.0), fault(Cause.WORKER_CRASH, 2.0, rank=3))
    assert primary(faults).rank == 3


def test_an_error_is_the_same_by_type_step_message_and_place_numbers_apart() -> None:
    first = mark_of(raised("rank 0 at 0x7f12 lost 12.5"), 9)
    assert first == mark_of(raised("rank 3 at 0x7aa0 lost 1"), 9)
    assert first is not None
    assert first.location == "/code/train.py:40 in step"
    for other in (raised(step=11), raised(line=41), raised("yes"), raised(type_="KeyError")):
        assert mark_of(other, 9) != mark_of(raised(), 9)


def test_what_a_process_does_to_itself_is_known_by_the_step_it_did_not_get_beyond() -> None:
    left = fault(Cause.WORKER_CRASH, ended_by="exit code 3")
    assert mark_of(left, 7) == mark_of(fault(Cause.WORKER_CRASH, ended_by="exit code 3"), 7)
    assert mark_of(left, 7) != mark_of(left, 8)
    assert mark_of(left, 7) != mark_of(fault(Cause.WORKER_CRASH, ended_by="exit code 4"), 7)
    assert mark_of(fault(Cause.OUT_OF_MEMORY), 7) == mark_of(fault(Cause.OUT_OF_MEMORY), 7)
    assert mark_of(fault(Cause.WORKER_CRASH, ended_by="SIGKILL"), 7) is None


@pytest.mark.parametrize(
    ("accused", "blamed"),
    [
        (fault(Cause.WORKER_CRASH, ended_by="SIGSEGV"), True),
        (fault(Cause.WORKER_CRASH, ended_by="SIGKILL"), False),  # somebody chose that process
        (fault(Cause.WORKER_CRASH, ended_by="exit code 3"), False),
        (fault(Cause.HANG), True),
        (fault(Cause.CORRUPTION), True),
        (fault(Cause.PREEMPTED), False),  # fitness knows of it, as long as it lasts
        (fault(Cause.USER_ERROR), False),
        (fault(Cause.COMMUNICATION), False),
        (Fault(Cause.HANG, 1, 0.0, "nobody was named"), False),
    ],
)
def test_a_node_is_blamed_for_what_it_may_have_done(accused: Fault, blamed: bool) -> None:
    assert blames_node(accused) is blamed
