"""The last lines of a program are kept; printing or computing is a sign of life."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.programs.output_tail import KEPT_LINES, OutputTail
from holdfast_workers.programs.silence import Silence


@given(st.lists(st.text("ab\n", max_size=9).map(str.encode), max_size=20))
def test_lines_do_not_depend_on_the_pieces(pieces: list[bytes]) -> None:
    whole, piecewise = OutputTail(), OutputTail()
    expected = whole.feed(b"".join(pieces))
    found = [line for piece in pieces for line in piecewise.feed(piece)]
    assert found == expected
    assert piecewise.text() == whole.text()
    assert piecewise.bytes == len(b"".join(pieces))


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
    assert not silence.has_sign_of_life(10, 0.52, 4.0)
