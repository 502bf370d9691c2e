from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.memory.background_copy import Copies, Patience


def test_training_goes_on_once_the_state_is_captured_whatever_else_is_copied() -> None:
    copies, go_on = Copies(), threading.Event()

    def job(captured: Callable[[str], None]) -> None:
        captured("digest")
        go_on.wait(10)

    digest = copies.start(job)
    copies.await_captured()
    assert digest() == "digest"
    go_on.set()
    copies.finish()


def test_the_state_is_not_given_back_before_it_is_captured() -> None:
    copies = Copies()
    seen: list[str] = []

    def job(captured: Callable[[str], None]) -> None:
        time.sleep(0.1)
        seen.append("copied")
        captured("")

    copies.start(job)
    copies.await_captured()
    assert seen == ["copied"]
    copies.end(1.0)


def test_copies_are_made_one_after_the_other() -> None:
    copies = Copies()
    at_once = threading.Semaphore(1)

    def job(captured: Callable[[str], None]) -> None:
        assert at_once.acquire(blocking=False)
        captured("")
        time.sleep(0.01)
        at_once.release()

    for _ in range(5):
        copies.start(job)
        copies.await_captured()
    copies.finish()


def test_what_prevented_a_capture_is_raised_where_it_is_waited_for() -> None:
    copies = Copies()

    def job(captured: Callable[[str], None]) -> None:
        raise OSError("shared memory is full")

    digest = copies.start(job)
    for wait in (copies.await_captured, digest, copies.finish):
        with pytest.raises(OSError, match="full"):
            wait()
    copies.end(1.0)


def test_what_failed_after_the_capture_is_raised_by_the_next_copy() -> None:
    copies = Copies()

    def job(captured: Callable[[str], None]) -> None:
        captured("")
        raise OSError("no room for a second copy")

    copies.start(job)
    copies.await_captured()
    with pytest.raises(OSError, match="second"):
        copies.finish()
    with pytest.raises(OSError, match="second"):
        copies.start(job)


def test_a_failure_is_not_forgotten_where_the_next_copy_was_started_before_it() -> None:
    copies, go_on = Copies(), threading.Event()

    def failing(captured: Callable[[str], None]) -> None:
        captured("")
        go_on.wait(10)
        raise OSError("no room for a second copy")

    copies.start(failing)
    second = copies.start(lambda captured: captured("second"))
    go_on.set()
    assert second() == "second"
    with pytest.raises(OSError, match="no room"):
        copies.start(lambda captured: captured("third"))
    with pytest.raises(OSError, match="no room"):
        copies.finish()


def test_at_the_end_a_short_copy_becomes_whole_and_a_long_one_is_stopped() -> None:
    whole: list[bool] = []

    def job(seconds: float, copies: Copies) -> Callable[[Callable[[str], None]], None]:
        def run(captured: Callable[[str], None]) -> None:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and not copies.stopped:
                time.sleep(0.005)
            whole.append(not copies.stopped)
            captured("")

        return run

    for seconds in (0.05, 60.0):
        copies = Copies()
        copies.start(job(seconds, copies))
        copies.end(0.3)
    assert whole == [True, False]


def train(patience: Patience, step_s: float, takes_s: float, look_s: float) -> float:
    """A step, and a look at a checkpoint that arrives after `takes_s`; the time waited for it."""
    patience.earn(step_s)
    waited_s = min(patience.allowance_s(look_s), max(0.0, takes_s - look_s))
    patience.waited(look_s, waited_s, arrived=look_s + waited_s >= takes_s)
    return waited_s


@given(
    st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3)), min_size=1, max_size=50),
    st.floats(0.01, 5),
)
def test_waiting_costs_a_share_of_training_and_what_there_was_to_begin_with(
    looks: list[tuple[float, float]], step_s: float
) -> None:
    patience = Patience(2.0, 0.01)
    waited = sum(train(patience, step_s, takes, look) for takes, look in looks)
    assert waited <= 2.0 + 0.01 * step_s * len(looks) + 1e-9


def test_who_is_late_once_in_a_while_is_waited_for() -> None:
    patience = Patience(2.0, 0.01)
    for _ in range(1000):
        assert train(patience, 0.5, takes_s=1.0, look_s=0.5) == pytest.approx(0.5)
        for _ in range(100):
            assert train(patience, 0.5, takes_s=0.2, look_s=0.5) == 0.0


def test_who_is_always_a_little_late_is_waited_for_every_time() -> None:
    patience = Patience(2.0, 0.01)
    for _ in range(1000):
        assert train(patience, 0.5, takes_s=0.304, look_s=0.3) == pytest.approx(0.004)


def test_who_is_always_late_is_soon_not_waited_for() -> None:
    patience = Patience(2.0, 0.01)
    waits = [train(patience, 0.5, takes_s=0.8, look_s=0.5) for _ in range(600)]
    assert sum(waits) <= 2.0 + 0.3
    assert sum(waits[10:]) == 0.0


def test_a_tier_that_becomes_quick_is_waited_for_again() -> None:
    patience = Patience(2.0, 0.01)
    for _ in range(100):
        train(patience, 0.1, takes_s=9.0, look_s=0.1)
    for _ in range(8):
        train(patience, 9.9, takes_s=0.1, look_s=0.2)
    assert train(patience, 9.9, takes_s=0.25, look_s=0.2) == pytest.approx(0.05)
