from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.memory.background_copy import BackgroundCopies, CopyJob, WaitBudget
from holdfast_workers.state.digest import ShardDigest

DIGEST = ShardDigest("whole", "shared")


def test_training_continues_as_soon_as_the_state_is_captured() -> None:
    copies, proceed = BackgroundCopies(), threading.Event()

    def job(captured: Callable[[ShardDigest], None]) -> None:
        captured(DIGEST)
        proceed.wait(60)

    digest = copies.start(job)
    copies.await_captured()
    assert digest() == DIGEST
    proceed.set()
    copies.finish()


def test_training_cannot_change_the_state_before_it_is_captured() -> None:
    copies = BackgroundCopies()
    seen: list[str] = []

    def job(captured: Callable[[ShardDigest], None]) -> None:
        time.sleep(0.1)
        seen.append("copied")
        captured(DIGEST)

    copies.start(job)
    copies.await_captured()
    assert seen == ["copied"]
    copies.end(1.0)


def test_copies_are_made_one_after_the_other() -> None:
    copies = BackgroundCopies()
    at_once = threading.Semaphore(1)

    def job(captured: Callable[[ShardDigest], None]) -> None:
        assert at_once.acquire(blocking=False)
        captured(DIGEST)
        time.sleep(0.01)
        at_once.release()

    for _ in range(5):
        copies.start(job)
        copies.await_captured()
    copies.finish()


def test_a_failed_capture_is_raised_by_every_wait_for_it() -> None:
    copies = BackgroundCopies()

    def job(captured: Callable[[ShardDigest], None]) -> None:
        raise OSError("shared memory is full")

    digest = copies.start(job)
    for wait in (copies.await_captured, digest, copies.finish):
        with pytest.raises(OSError, match="full"):
            wait()
    copies.end(1.0)


def test_a_failure_after_the_capture_is_raised_by_the_next_copy() -> None:
    copies = BackgroundCopies()

    def job(captured: Callable[[ShardDigest], None]) -> None:
        captured(DIGEST)
        raise OSError("no room for a second copy")

    copies.start(job)
    copies.await_captured()
    with pytest.raises(OSError, match="second"):
        copies.finish()
    with pytest.raises(OSError, match="second"):
        copies.start(job)


def test_a_failure_is_raised_even_if_the_next_copy_had_already_started() -> None:
    copies, proceed = BackgroundCopies(), threading.Event()

    def failing(captured: Callable[[ShardDigest], None]) -> None:
        captured(DIGEST)
        proceed.wait(60)
        raise OSError("no room for a second copy")

    copies.start(failing)
    second = copies.start(lambda captured: captured(DIGEST))
    proceed.set()
    assert second() == DIGEST
    with pytest.raises(OSError, match="no room"):
        copies.start(lambda captured: captured(DIGEST))
    with pytest.raises(OSError, match="no room"):
        copies.finish()


def test_end_lets_a_short_copy_complete_and_stops_a_long_one() -> None:
    completed: list[bool] = []

    def job(seconds: float, copies: BackgroundCopies) -> CopyJob:
        def run(captured: Callable[[ShardDigest], None]) -> None:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and not copies.stopped:
                time.sleep(0.005)
            completed.append(not copies.stopped)
            captured(DIGEST)

        return run

    for seconds, patience_s in ((0.05, 60.0), (3600.0, 0.3)):
        copies = BackgroundCopies()
        copies.start(job(seconds, copies))
        copies.end(patience_s)
    assert completed == [True, False]


def train(budget: WaitBudget, step_s: float, takes_s: float, since_s: float) -> float:
    """Train one step, then wait for a checkpoint that was started `since_s` ago and takes
    `takes_s`. Returns the time waited."""
    budget.earn(step_s)
    waited_s = min(budget.allowance_s(since_s), max(0.0, takes_s - since_s))
    budget.record_wait(since_s, waited_s, arrived=since_s + waited_s >= takes_s)
    return waited_s


@given(
    st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3)), min_size=1, max_size=50),
    st.floats(0.01, 5),
)
def test_waiting_costs_at_most_a_share_of_training_plus_the_initial_budget(
    delays: list[tuple[float, float]], step_s: float
) -> None:
    budget = WaitBudget(2.0, 0.01)
    waited = sum(train(budget, step_s, takes, since_s) for takes, since_s in delays)
    assert waited <= 2.0 + 0.01 * step_s * len(delays) + 1e-9


def test_an_occasionally_late_tier_is_waited_for() -> None:
    budget = WaitBudget(2.0, 0.01)
    for _ in range(1000):
        assert train(budget, 0.5, takes_s=1.0, since_s=0.5) == pytest.approx(0.5)
        for _ in range(100):
            assert train(budget, 0.5, takes_s=0.2, since_s=0.5) == 0.0


def test_a_tier_that_is_always_a_little_late_is_waited_for_every_time() -> None:
    budget = WaitBudget(2.0, 0.01)
    for _ in range(1000):
        assert train(budget, 0.5, takes_s=0.304, since_s=0.3) == pytest.approx(0.004)


def test_a_tier_that_is_always_late_is_soon_no_longer_waited_for() -> None:
    budget = WaitBudget(2.0, 0.01)
    waits = [train(budget, 0.5, takes_s=0.8, since_s=0.5) for _ in range(600)]
    assert sum(waits) <= 2.0 + 0.3
    assert sum(waits[10:]) == 0.0


def test_a_tier_that_becomes_fast_is_waited_for_again() -> None:
    budget = WaitBudget(2.0, 0.01)
    for _ in range(100):
        train(budget, 0.1, takes_s=9.0, since_s=0.1)
    for _ in range(8):
        train(budget, 9.9, takes_s=0.1, since_s=0.2)
    assert train(budget, 9.9, takes_s=0.25, since_s=0.2) == pytest.approx(0.05)
