"""A thread of turns: one that fails costs no other, and after the end there is none."""

from __future__ import annotations

import threading

import pytest

from holdfast_workers.agent.periodic_thread import Turns


def test_a_turn_that_fails_costs_that_turn_alone_and_says_why(
    capfd: pytest.CaptureFixture[str],
) -> None:
    turns, again = 0, threading.Event()

    def turn() -> None:
        nonlocal turns
        turns += 1
        if turns == 1:
            raise RuntimeError("a turn that fails")
        again.set()

    thread = Turns("t", 0.001, turn)
    thread.start()
    assert again.wait(5.0)
    thread.stop(5.0)
    assert "a turn that fails" in capfd.readouterr().err


def test_it_ends_when_it_is_told_though_its_next_turn_is_far_off() -> None:
    turned, ended = threading.Event(), threading.Event()
    thread = Turns("t", 600.0, turned.set, ended.set)
    thread.start()
    assert turned.wait(5.0) and not ended.is_set()
    thread.stop(5.0)
    assert ended.is_set()


def test_a_turn_that_does_not_return_holds_up_nobody() -> None:
    begun, free, ended = (threading.Event() for _ in range(3))

    def turn() -> None:
        begun.set()
        free.wait(60.0)

    thread = Turns("t", 0.001, turn, ended.set)
    thread.start()
    assert begun.wait(5.0)
    thread.stop(0.01)
    assert not ended.is_set()
    free.set()
    assert ended.wait(5.0)


def test_one_that_never_began_is_stopped_like_any_other() -> None:
    Turns("t", 0.001, lambda: None).stop(5.0)
