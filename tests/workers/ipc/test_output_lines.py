"""Lines of output are the same for all cuts; of a bar the log keeps little, and the last state."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.ipc.output_lines import (
    GOES_ON,
    LINE_BYTES,
    STATE_S,
    LineSplitter,
    LogLines,
    OutputLine,
)


@given(
    st.text("ab é\n\r", max_size=60).map(str.encode),
    st.lists(st.integers(0, 70), max_size=8).map(sorted),
    st.booleans(),
)
def test_lines_do_not_depend_on_where_the_output_is_cut(
    output: bytes, cuts: list[int], long: bool
) -> None:
    output = output.replace(b"b", "bé".encode() * LINE_BYTES) if long else output
    whole, divided = LineSplitter(), LineSplitter()
    expected = whole.feed(output)
    bounds = [0, *cuts, len(output)]
    pieces = (output[start:end] for start, end in itertools.pairwise(bounds))
    assert [line for piece in pieces for line in divided.feed(piece)] == expected
    assert divided.open == whole.open
    assert all(len(line.text.encode()) <= LINE_BYTES for line in expected)
    assert "\ufffd" not in "".join(line.text for line in expected)


def test_a_return_ends_a_line_as_a_newline_does() -> None:
    assert LineSplitter().feed(b"one\rtwo\nthree\r\nfour") == [
        OutputLine("one", is_state=True),
        OutputLine("two", is_state=False),
        OutputLine("three", is_state=False),
    ]
    splitter = LineSplitter()
    assert splitter.feed(b"four\r") == [] and splitter.open == "four"
    assert splitter.feed(b"\n") == [OutputLine("four", is_state=False)]
    assert splitter.feed(b"five\r") == []
    assert splitter.feed(b"6") == [OutputLine("five", is_state=True)]


def logged(*pieces: tuple[float, bytes]) -> list[str]:
    log = LogLines()
    found = [text for now, piece in pieces for text in log.feed(piece, now)]
    return [str(text) for text in (*found, *log.end(pieces[-1][0]))]


def test_of_a_bar_the_log_keeps_one_state_a_second_and_the_last() -> None:
    states = [(10.0 + number / 10, b"\r%d of 30" % number) for number in range(1, 31)]
    found = logged(*states, (13.0, b"\nend\n"))
    assert found[-2:] == ["30 of 30", "end"]
    assert len(found) == 6 and found[0] == "1 of 30"
    assert logged(*states)[-1] == "30 of 30"
    assert logged((0.0, b"1 of 2\r2 of 2\r"), (0.1, b"ended\n")) == ["1 of 2", "2 of 2", "ended"]


def test_every_line_that_ends_by_return_and_newline_is_logged() -> None:
    for output in (b"one\r\ntwo\r\n\r\nthree\r\n", b"one\ntwo\n\nthree\n"):
        cut = [(0.0, bytes([byte])) for byte in output]
        assert logged((0.0, output)) == logged(*cut) == ["one", "two", "", "three"]


def test_the_state_at_which_a_bar_stands_is_logged_after_a_while() -> None:
    log = LogLines()
    assert log.feed(b"1%\r2%\r3", 10.0) == ["1%"]
    assert log.waits
    assert log.look(10.0 + STATE_S / 2) == []
    found = [log.look(10.0 + STATE_S), log.look(10.0 + 2 * STATE_S), log.end(20.0)]
    assert found == [["2%"], [], ["3"]]


@given(st.lists(st.integers(0, 3 * LINE_BYTES), max_size=4), st.integers(1, 3 * LINE_BYTES))
def test_the_parts_of_a_long_line_say_that_it_goes_on(lengths: list[int], cut: int) -> None:
    lines = [f"{number}{'é' * (length // 2)}" for number, length in enumerate(lengths)]
    output = "\n".join(lines).encode()
    found = logged(*((0.0, output[at : at + cut]) for at in range(0, len(output) + 1, cut)))
    assert "\n".join(found).replace(f"{GOES_ON}\n", "") == "\n".join(lines)


def test_a_bar_that_is_erased_for_a_line_leaves_no_state() -> None:
    bar = b"\r50%\r     \rmessage\n\r50%"
    assert logged((0.0, b"\r1%"), (0.1, bar * 3)) == ["1%", *["message"] * 3, "50%"]
