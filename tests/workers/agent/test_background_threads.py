"""A periodic thread: an exception ends only its call, and no call follows `stop`."""

from __future__ import annotations

import threading

import pytest
from tests.support.waiting import DEADLINE_S

from holdfast_workers.agent.background_threads import PeriodicThread


@pytest.mark.usefixtures("logs_on_stderr")
def test_an_exception_is_logged_and_ends_only_that_call(
    capfd: pytest.CaptureFixture[str],
) -> None:
    calls, again = 0, threading.Event()

    def call() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("a call that fails")
        again.set()

    thread = PeriodicThread("t", 0.001, call)
    thread.start()
    assert again.wait(DEADLINE_S)
    thread.stop(5.0)
    assert "a call that fails" in capfd.readouterr().err


def test_a_call_may_ask_for_the_next_one_sooner_but_not_later() -> None:
    for period_s, asked_s in ((600.0, 0.001), (0.001, 600.0)):
        called = threading.Semaphore(0)

        def call(asked_s: float = asked_s, called: threading.Semaphore = called) -> float:
            called.release()
            return asked_s

        thread = PeriodicThread("t", period_s, call)
        thread.start()
        assert all(called.acquire(timeout=DEADLINE_S) for _ in range(3))
        thread.stop(5.0)


def test_stop_ends_the_thread_without_waiting_for_the_next_call() -> None:
    called, ended = threading.Event(), threading.Event()
    thread = PeriodicThread("t", 600.0, called.set, ended.set)
    thread.start()
    assert called.wait(DEADLINE_S) and not ended.is_set()
    thread.stop(5.0)
    assert ended.is_set()


def test_a_call_that_does_not_return_does_not_block_stop() -> None:
    begun, free, ended = (threading.Event() for _ in range(3))

    def call() -> None:
        begun.set()
        free.wait(60.0)

    thread = PeriodicThread("t", 0.001, call, ended.set)
    thread.start()
    assert begun.wait(DEADLINE_S)
    thread.stop(0.01)
    assert not ended.is_set()
    free.set()
    assert ended.wait(DEADLINE_S)


def test_a_thread_that_was_never_started_can_be_stopped() -> None:
    PeriodicThread("t", 0.001, lambda: None).stop(5.0)
