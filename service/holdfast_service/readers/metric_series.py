"""Converts stored metric rows to named and derived series, and thins them out for charts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from holdfast_service.store import json_safe, series
from holdfast_service.views.history import MetricPoint
from holdfast_workers.protocol.metrics import METRICS

Row = tuple[int, int, list[Any]]
"""(step, attempt, values in the order of series.COLUMNS)."""


def point(names: Sequence[str], step: int, attempt: int, stored: Sequence[Any]) -> MetricPoint:
    """The named values of a step; null if a value was not measured or is not finite."""
    known = series.own_metrics(stored) | dict(zip(series.COLUMNS, stored, strict=False))
    seconds, tokens = (json_safe.number(known.get(name)) for name in ("step_time_s", "tokens"))
    known["tokens"] = tokens or None  # a program need not report any
    known["tokens_per_second"] = tokens / seconds if seconds and tokens else None
    values = {
        name: known.get(name) if name == "samples" else json_safe.number(known.get(name))
        for name in names
    }
    return MetricPoint(step=step, attempt=attempt, at=known["at"], values=values)


def full_point(step: int, attempt: int, stored: Sequence[Any]) -> MetricPoint:
    """All values of a step, including those reported by the user's function."""
    return point((*METRICS, *series.own_metrics(stored)), step, attempt, stored)


def thinned_with_extremes(rows: Sequence[Row], names: Sequence[str], most: int) -> list[Row]:
    """At most `most` rows: from each bucket of steps, the rows with the minimum and maximum of each
    charted series in `names`; always includes the last row, the present."""
    if len(rows) <= most:
        return list(rows)
    readers = [_reader(name) for name in charted(names)]
    buckets = max(1, (most - 1) // (2 * len(readers)))
    first, last = rows[0][0], rows[-1][0]
    kept = {last}
    by_bucket: dict[int, list[Row]] = {}
    for row in rows:
        by_bucket.setdefault((row[0] - first) * buckets // (last - first + 1), []).append(row)
    for bucket in by_bucket.values():
        for read in readers:
            values = [(value, row[0]) for row in bucket if (value := read(row[2])) is not None]
            if values:
                kept |= {min(values)[1], max(values)[1]}
    return [row for row in rows if row[0] in kept]


def discarded_point_budget(rows: int, history: Sequence[Row], points: int) -> int:
    """Number of chart points for `rows` discarded steps, beside a history of `points` points: in
    proportion to their length on the chart, but at least `_MIN_DISCARDED_POINTS`."""
    steps = history[-1][0] - history[0][0] + 1 if history else rows
    return max(_MIN_DISCARDED_POINTS, min(points, points * rows // steps))


def charted(names: Sequence[str]) -> tuple[str, ...]:
    """The series whose extremes a chart of `names` must show."""
    wanted = {METRICS[name].derived_from or name for name in names if name in METRICS}
    own = tuple(name for name in names if name not in METRICS)
    return (*(name for name in _CHARTED if name in wanted), *own) or _CHARTED[:1]


def _reader(name: str) -> Callable[[Sequence[Any]], float | None]:
    if name not in METRICS:
        return lambda stored: json_safe.number(series.own_metrics(stored).get(name))
    column = series.COLUMNS.index(name)
    return lambda stored: json_safe.number(stored[column]) if column < len(stored) else None


_MIN_DISCARDED_POINTS = 64
_CHARTED = tuple(name for name, metric in METRICS.items() if metric.charted)
