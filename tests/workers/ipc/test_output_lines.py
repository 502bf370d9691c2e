"""Lines of output are the same for all cuts; of a bar the log keeps little, and the last state."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.ipc.output_lines import LINE_BYTES, LineSplitter, LogLines, OutputLine


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
    return [text for now, piece in pieces for text in log.feed(piece, now)] + log.end()


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


def test_a_bar_that_is_erased_for_a_line_leaves_no_state() -> None:
    bar = b"\r50%\r     \rmessage\n\r50%"
    assert logged((0.0, b"\r1%"), (0.1, bar * 3)) == ["1%", *["message"] * 3, "50%"]
