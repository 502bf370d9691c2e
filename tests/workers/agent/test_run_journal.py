"""Pages of an agent's journal: each row and line is fetched once."""

from __future__ import annotations

from tests.support.service.fake_cluster import row

from holdfast_workers.agent import run_journal
from holdfast_workers.agent.run_journal import RunJournal


def marks(kept: RunJournal, after: tuple[int, int]) -> list[tuple[int, int]]:
    return [(row.attempt, row.step) for row in kept.after(after)[0]]


def test_rows_are_fetched_once_in_order_of_attempt_and_step() -> None:
    kept = RunJournal("n0", "life")
    for attempt, step in ((1, 1), (1, 2), (1, 3), (2, 2), (2, 3)):
        assert kept.add_row(row(attempt, step)) == ((attempt, step) in ((1, 1), (2, 2)))
    assert marks(kept, (0, 0)) == [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3)]
    assert marks(kept, (1, 2)) == [(1, 3), (2, 2), (2, 3)]
    assert marks(kept, (2, 3)) == []


def test_a_late_row_of_an_older_attempt_hides_no_row() -> None:
    kept = RunJournal("n0", "life")
    for attempt, step in ((1, 1), (2, 2), (1, 2), (2, 3)):
        kept.add_row(row(attempt, step))
    assert marks(kept, (1, 2)) == [(2, 2), (2, 3)]


def test_rows_beyond_a_page_are_in_the_next_page() -> None:
    kept = RunJournal("n0", "life")
    for step in range(1, run_journal.PAGE_ROWS + 3):
        kept.add_row(row(1, step))
    first = marks(kept, (0, 0))
    assert len(first) == run_journal.PAGE_ROWS
    assert marks(kept, first[-1]) == [
        (1, run_journal.PAGE_ROWS + 1),
        (1, run_journal.PAGE_ROWS + 2),
    ]


def test_log_lines_are_fetched_once_in_order() -> None:
    kept = RunJournal("n0", "life")
    for text in ("a", "b", "c"):
        kept.log("n0.life.1", 1, 0, text)
    lines, left = kept.lines_after(1, 0)
    assert ([line.text for line in lines], left) == (["b", "c"], 0)
    assert kept.lines_after(3, 3) == ((), 0)


def test_digests_of_steps_that_a_new_attempt_computes_again_are_dropped() -> None:
    kept = RunJournal("n0", "life")
    for step in (3, 4):
        kept.add_row(row(1, step))
        kept.add_digest(step, f"first {step}", 1)
    kept.add_row(row(2, 4))
    assert kept.after((0, 0))[1] == {3: (1, "first 3")}
    kept.add_digest(4, "second 4", 2)
    assert kept.after((0, 0))[1] == {3: (1, "first 3"), 4: (2, "second 4")}
