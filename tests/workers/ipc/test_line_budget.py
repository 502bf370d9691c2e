"""A log keeps what fits into its rate; where it does not, a mark counts what is missing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.ipc.line_budget import (
    BURST_LINES,
    CHARACTERS_PER_LINE,
    LAST_LINES,
    LINES_PER_S,
    LeftOut,
    LineBudget,
)


def lines(first: int, count: int) -> list[str]:
    return [f"line {number}" for number in range(first, first + count)]


def taken(budget: LineBudget, texts: list[str], now: float) -> list[str | LeftOut]:
    return [kept for text in texts for kept in budget.take(text, now)]


@given(
    st.lists(
        st.tuples(st.floats(0.0, 3.0), st.integers(0, 3 * LINES_PER_S), st.booleans()), max_size=6
    ),
    st.booleans(),
)
def test_each_line_is_kept_in_order_or_counted_where_it_is_missing(
    parts: list[tuple[float, int, bool]], starts_full: bool
) -> None:
    budget, now, printed = LineBudget(), 0.0, 0 if starts_full else BURST_LINES
    found: list[str | LeftOut] = [*taken(budget, lines(0, printed), now)]
    assert found == lines(0, printed), "what fits into the budget is kept"
    for pause_s, count, looks in parts:
        now += pause_s
        found += budget.look(now) if looks and budget.holds else []
        found += taken(budget, lines(printed, count), now)
        printed += count
    found += budget.end()
    at = 0
    for entry in found:
        if isinstance(entry, LeftOut):
            gap = lines(at, entry.lines)
            assert entry.lines and entry.bytes == len("\n".join([*gap, ""]).encode())
            at += entry.lines
        else:
            assert entry == f"line {at}"
            at += 1
    assert at == printed
    last = found[-min(LAST_LINES, printed) :]
    assert not any(isinstance(entry, LeftOut) for entry in last), "the last lines are always kept"
    assert sum(isinstance(entry, LeftOut) for entry in found) <= 1 + now, "one mark a second"


def test_lines_at_the_stated_rate_are_all_kept_for_ever() -> None:
    budget, printed = LineBudget(), 0
    for second in range(200):
        for tenth in range(10):
            texts = lines(printed, LINES_PER_S // 10)
            assert taken(budget, texts, second + tenth / 10) == texts
            printed += len(texts)
    assert printed > 2 * BURST_LINES


def test_a_long_line_counts_as_several() -> None:
    long = "x" * (CHARACTERS_PER_LINE * 9)
    budget = LineBudget()
    kept = sum(len(budget.take(long, 0.0)) for _ in range(BURST_LINES))
    assert kept == BURST_LINES // 10


def test_a_mark_says_what_is_missing_of_which_rank_and_why() -> None:
    mark = (LeftOut.of("four") + LeftOut(1_233, 9_995)).mark(3, "too many")
    assert mark == "WARNING ... 1,234 lines (10,000 bytes) of rank 3 left out: too many"
    assert LeftOut.of("").mark(None, "x") == "WARNING ... 1 line (1 bytes) left out: x"
