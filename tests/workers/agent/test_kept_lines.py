"""Lines wait at the agent until they are stored; too many that wait are counted in a mark."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.agent.kept_lines import PAGE_CHARACTERS, KeptLines
from holdfast_workers.ipc.line_budget import LeftOut
from holdfast_workers.protocol.messages import LogLine

MOST = 20
LOST = re.compile(r"WARNING \.\.\. (\d+) lines? \(\d+ bytes\) of rank (\d) left out: ")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("print"), st.integers(0, 2), st.integers(1, 15)),
        st.tuples(st.just("mark"), st.integers(0, 2), st.integers(1, 15)),
        st.tuples(st.just("fetch"), st.integers(0, 12), st.booleans()),
        st.tuples(st.just("store"), st.integers(0, 12), st.just(0)),
        st.tuples(st.just("successor"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


def line(seq: int, rank: int = 0, text: str = "text") -> LogLine:
    return LogLine("n0", "a", seq, 0.0, f"w{rank}", 1, rank, "output", text)


def count(entry: LogLine) -> int:
    """The number of printed lines for which an entry stands."""
    found = LOST.match(entry.text)
    return int(found[1]) if found else int(entry.text)


@given(STEPS)
def test_each_line_is_stored_once_or_counted_once_in_the_mark_in_its_place(
    steps: list[tuple[str, int, int]],
) -> None:
    kept = KeptLines(lines=MOST)
    printed = dict.fromkeys(range(3), 0)
    seq = fetched = acked = 0
    here: list[LogLine] = []  # at the supervisor, not stored yet
    stored: list[LogLine] = []

    def fetch(most: int, arrives: bool) -> None:
        nonlocal fetched
        kept.forget(acked)
        page = kept.after(fetched, most)
        assert all(entry.seq > fetched for entry in page)
        if arrives and page:
            here.extend(page)
            fetched = page[-1].seq

    def store(most: int) -> None:
        nonlocal acked
        last = stored[-1].seq if stored else 0
        stored.extend(entry for entry in here[:most] if entry.seq > last)
        del here[:most]
        acked = stored[-1].seq if stored else 0

    for name, first, second in steps:
        match name:
            case "print":
                for _ in range(second):
                    seq += 1
                    kept.add(line(seq, first, "1"))
                    printed[first] += 1
            case "mark":  # the rank has printed more than its budget
                seq += 1
                kept.add(line(seq, first, str(second)), LeftOut(second, 5))
                printed[first] += second
            case "fetch":
                fetch(first, bool(second))
            case "store":
                store(first)
            case "successor":  # of a supervisor that was lost, with what it had
                here, fetched = [], 0
    for _ in range(10):
        fetch(1000, True)
        store(1000)
    assert kept.count_after(fetched) == 0
    seqs = [entry.seq for entry in stored]
    assert seqs == sorted(set(seqs))
    for rank, number in printed.items():
        assert sum(count(entry) for entry in stored if entry.rank == rank) == number
    if seq <= MOST:
        assert not any(LOST.match(entry.text) for entry in stored)


def test_a_page_is_bounded_by_its_characters_too() -> None:
    kept = KeptLines()
    for seq in range(1, 2_001):
        kept.add(line(seq, text="x" * 8192))
    page = kept.after(0, 2_000)
    assert sum(len(entry.text) for entry in page) <= PAGE_CHARACTERS + 8192
    assert kept.count_after(page[-1].seq) == 2_000 - len(page)


def test_the_characters_that_wait_are_bounded() -> None:
    kept = KeptLines(characters=1_000)
    for seq in range(1, 101):
        kept.add(line(seq, text="x" * 100))
    found = kept.after(0, 1_000)
    assert len(found) == 11
    assert "... 90 lines (9,090 bytes) of rank 0 left out" in found[0].text
    assert found[0].text.endswith("a node keeps 1,000 characters")


def test_the_mark_names_the_number_of_lines_if_that_was_the_limit() -> None:
    kept = KeptLines(lines=2)
    for seq in range(1, 4):
        kept.add(line(seq))
    assert kept.after(0, 10)[0].text.endswith("a node keeps 2 lines")
