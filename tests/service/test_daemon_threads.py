"""Threads for calls that may hang: few of them, and nothing waits for them at the end."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import wait

import pytest
from tests.support.waiting import DEADLINE_S, eventually

from holdfast_service.daemon_threads import DaemonThreads

ENDS_WITH_A_HANGING_CALL = """
import asyncio, threading
from holdfast_service.daemon_threads import DaemonThreads

async def main():
    threads = DaemonThreads(2, "hanging")
    loop = asyncio.get_running_loop()
    for _ in range(3):
        loop.run_in_executor(threads, threading.Event().wait)
    print(await loop.run_in_executor(DaemonThreads(1, "other"), lambda: "ended"))

asyncio.run(main())
"""


def test_the_end_of_a_process_waits_for_no_call() -> None:
    command = [sys.executable, "-c", ENDS_WITH_A_HANGING_CALL]
    ended = subprocess.run(command, timeout=60, capture_output=True, text=True, check=True)
    assert ended.stdout == "ended\n"


def test_calls_return_and_raise_and_no_more_than_the_limit_run() -> None:
    threads = DaemonThreads(3, "limited")
    begun, over = threading.Semaphore(0), threading.Event()

    def call(number: int) -> int:
        begun.release()
        over.wait(600)
        return 10 // number

    calls = [threads.submit(call, number) for number in (1, 2, 0, 5, 10)]
    for _ in range(3):
        assert begun.acquire(timeout=DEADLINE_S)
    assert not begun.acquire(blocking=False)
    assert [call.running() for call in calls] == [True, True, True, False, False]
    assert calls[4].cancel()
    over.set()
    wait(calls, DEADLINE_S)
    assert [call.result() for call in calls[:2]] == [10, 5]
    assert isinstance(calls[2].exception(), ZeroDivisionError)
    assert calls[3].result() == 2


def test_idle_threads_are_used_again_and_end_with_their_pool() -> None:
    threads = DaemonThreads(3, "of-this-test")

    def mine() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "of-this-test"]

    for _ in range(20):
        first = threads.submit(threading.get_ident)
        assert first.result(DEADLINE_S)
    assert len(mine()) <= 3
    del threads, first
    eventually(lambda: not mine())


def test_a_call_whose_caller_has_gone_is_not_made() -> None:
    threads = DaemonThreads(1, "one")
    over, made = threading.Event(), threading.Event()
    threads.submit(over.wait, 600)
    late = threads.submit(made.set)
    assert late.cancel()
    over.set()
    assert threads.submit(lambda: 7).result(DEADLINE_S) == 7
    assert not made.is_set()
    with pytest.raises(ValueError, match="x"):
        threads.submit(int, "x").result(DEADLINE_S)
