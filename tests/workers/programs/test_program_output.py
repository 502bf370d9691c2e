"""The last lines of a program are kept; printing or computing is a sign of life."""

from __future__ import annotations

import pytest

from holdfast_workers.programs import error_file
from holdfast_workers.programs.program_output import KEPT_LINES, OutputTail, Silence


def test_of_a_progress_bar_the_last_state_is_kept() -> None:
    tail = OutputTail()
    for number in range(100):
        tail.feed(b"\r%d of 100" % number)
    tail.feed(b"\rdone\r\nValueError: no\r\n")
    assert tail.text().splitlines() == ["99 of 100", "done", "ValueError: no"]


def test_only_the_last_lines_are_kept() -> None:
    tail = OutputTail()
    tail.feed(b"".join(f"line {number}\n".encode() for number in range(1000)) + b"open")
    lines = tail.text().splitlines()
    assert lines[0] == f"line {1000 - KEPT_LINES}"
    assert lines[-1] == "open"


def test_a_line_without_end_is_bounded() -> None:
    tail = OutputTail()
    for _ in range(300):
        tail.feed(b"x" * 10_000)
    assert len(tail.text()) <= 4096


def test_printing_or_computing_is_a_sign_of_life() -> None:
    silence = Silence(looked_at=0.0)
    assert silence.has_sign_of_life(10, 0.0, 1.0)
    assert not silence.has_sign_of_life(10, 0.01, 2.0)
    assert silence.has_sign_of_life(10, 0.5, 3.0)
    assert silence.shown_at == 1.0
    assert not silence.has_sign_of_life(10, 0.52, 4.0)


@pytest.mark.parametrize("size", [600, 9_000, 3_000_000])
def test_a_long_line_does_not_push_out_the_traceback_that_it_ends(size: int) -> None:
    tail = OutputTail()
    text = f'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: {"x" * size}\n'
    for at in range(0, len(text), 1 << 16):
        tail.feed(text[at : at + (1 << 16)].encode())
    found = error_file.of_output("exit code 1", tail.text())
    assert (found.type, found.message[:3]) == ("ValueError", "xxx")
