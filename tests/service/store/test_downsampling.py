"""Outlines of chunks give the same results as the full rows."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.service.job_model.test_goodput import steps

from holdfast_service.job_model.goodput import (
    AttemptRun,
    CommittedStep,
    History,
    Outage,
    StepRange,
    account,
)
from holdfast_service.store.downsampling import outline

COLUMNS = ("at", "loss", "step_time_s")


def chunk(rows: list[CommittedStep]) -> dict[str, list[Any]]:
    return {str(row.step): [row.at, 1.0, row.step_time_s] for row in rows}


def as_outline(rows: list[CommittedStep]) -> StepRange:
    result = outline(COLUMNS, chunk(rows))
    assert result is not None
    return StepRange(
        rows[0].attempt,
        result.first,
        result.last,
        result.since,
        result.until,
        result.busy_s,
        result.steps,
    )


def test_an_outline_keeps_the_extremes() -> None:
    losses = [3.0, 9.0, 2.0, 0.5, 1.0]
    rows = {str(n + 1): [100.0 + n, loss, 1.0] for n, loss in enumerate(losses)}
    result = outline(COLUMNS, rows)
    assert result is not None
    assert set(result.rows) == {1, 2, 4, 5}
    assert {int(step) for step in result.data()["rows"]} == set(result.rows)
    assert outline(COLUMNS, {"1": ["NaN", 1.0, 1.0]}) is None
    odd = outline(COLUMNS, {**rows, "3": [102.0, "NaN", 1.0]})
    assert odd is not None and 3 in odd.rows


@given(
    gaps=st.lists(st.floats(0.0, 2.0), min_size=3, max_size=3),
    cut=st.integers(0, 12),
    size=st.integers(1, 5),
)
def test_the_account_of_outlines_equals_that_of_their_rows(
    gaps: list[float], cut: int, size: int
) -> None:
    first = steps(1, 1, 12, 10.0, gaps[0])
    begin = first[-1].at + 5.0
    rows = [*first, *steps(2, cut + 1, cut + 9, begin, gaps[1])]
    runs = [AttemptRun(1, 0), AttemptRun(2, cut, incident=4)]
    outages = [Outage(first[-1].at + 1.0, begin - 0.5, {"form": 1.0}, incident=4)]
    held = [(0.0, rows[-1].at + 3.0)]
    history = History(runs)
    mixed: list[CommittedStep | StepRange] = []
    for attempt in (1, 2):
        mine = [row for row in rows if row.attempt == attempt]
        for start in range(0, len(mine), size):
            part = mine[start : start + size]
            if history.has_one_fate(attempt, part[0].step, part[-1].step):
                mixed.append(as_outline(part))
            else:
                mixed += part
    exact = account(held, rows, runs, outages, ended=True)
    result = account(held, mixed, runs, outages, ended=True)
    assert (result.steps, result.steps_replayed) == (exact.steps, exact.steps_replayed)
    assert result.held_s == exact.held_s
    for kind, seconds in exact.by_kind_s.items():
        assert abs(result.by_kind_s[kind] - seconds) < 1e-4, kind
    assert abs(sum(result.lost_device_s.values()) - sum(exact.lost_device_s.values())) < 1e-4
    for goodput in (exact, result):
        assert abs(sum(span.until - span.since for span in goodput.spans) - goodput.held_s) < 1e-6
        ends = [span.until for span in goodput.spans]
        assert [span.since for span in goodput.spans][1:] == ends[:-1]
