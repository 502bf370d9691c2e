"""Outlines of metric chunks: a downsampled summary for long charts and time accounting. Pure.

An outline holds the rows with extreme values, so that a chart of a hundred thousand steps shows
every spike, and the sums that the goodput account needs. It is recomputed whenever its chunk is
written. A chunk with unreadable times has none; readers read its full rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast_service.store.json_safe import number
from holdfast_workers.protocol.metrics import METRICS

_KEPT = {name for name, metric in METRICS.items() if metric.outlined or metric.charted}
"""The columns whose extremes are kept."""
OWN = "own"
"""The column with the metrics reported by the user's function, by name."""


@dataclass(frozen=True)
class Outline:
    """Summary of a chunk. `since`: start of its first step; `until`: end of its last step, both in
    Unix seconds; `busy_s`: time spent inside steps. `rows`: the first, last and extreme rows,
    step -> values, ascending."""

    steps: int
    first: int
    last: int
    since: float
    until: float
    busy_s: float
    rows: Mapping[int, list[Any]]

    def data(self) -> dict[str, Any]:
        return vars(self) | {"rows": {str(step): values for step, values in self.rows.items()}}


def outline(columns: tuple[str, ...], rows: Mapping[str, list[Any]]) -> Outline | None:
    """The outline of a chunk's rows, whose values are in the order of `columns`. Returns None if a
    row's times are unreadable; readers then read the full rows."""
    at, step_time = columns.index("at"), columns.index("step_time_s")
    ordered = sorted((int(step), values) for step, values in rows.items())
    times = [(number(values[at]), number(values[step_time])) for _, values in ordered]
    if not ordered or any(end is None or took is None for end, took in times):
        return None
    busy_us, since_us, cursor = 0, 0, None
    for end, took in times:
        assert end is not None and took is not None
        end_us = round(end * 1e6)
        start_us = end_us - round(took * 1e6)
        if cursor is None:
            since_us = start_us
        else:
            end_us, start_us = max(end_us, cursor), max(start_us, cursor)
        busy_us += max(0, end_us - start_us)
        cursor = end_us
    assert cursor is not None
    kept = {ordered[0][0], ordered[-1][0]}
    for column, name in enumerate(columns):
        if name in _KEPT:
            kept |= _extremes([(step, row[column]) for step, row in ordered if len(row) > column])
    kept |= _own_extremes(columns, ordered)
    return Outline(
        steps=len(ordered),
        first=ordered[0][0],
        last=ordered[-1][0],
        since=since_us / 1e6,
        until=cursor / 1e6,
        busy_s=busy_us / 1e6,
        rows={step: values for step, values in ordered if step in kept},
    )


def _own_extremes(columns: tuple[str, ...], ordered: list[tuple[int, list[Any]]]) -> set[int]:
    """The steps of the extremes of every metric reported by the user's function."""
    if OWN not in columns:
        return set()
    column = columns.index(OWN)
    by_name: dict[str, list[tuple[int, Any]]] = {}
    for step, values in ordered:
        for name, value in values[column].items():
            by_name.setdefault(name, []).append((step, value))
    return {step for series in by_name.values() for step in _extremes(series)}


def _extremes(stored: list[tuple[int, Any]]) -> set[int]:
    """The steps of the smallest and largest value, and of the first value that is not finite."""
    kept: set[int] = set()
    finite: list[tuple[float, int]] = []
    for step, stored_value in stored:
        value = number(stored_value)
        if value is not None:
            finite.append((value, step))
        elif not kept:
            kept.add(step)
    if finite:
        kept |= {min(finite)[1], max(finite)[1]}
    return kept
