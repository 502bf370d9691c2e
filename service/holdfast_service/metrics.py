"""The series of a job as its readers see them: named, derived and thinned out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast_service.store import series, storable
from holdfast_service.views import MetricPoint

Row = tuple[int, int, list[Any]]
"""(step, attempt, values in the order of series.COLUMNS)."""

METRICS = (*(name for name in series.COLUMNS if name != "at"), "tokens_per_second")
"""Names of the series that a job has."""


def point(names: Sequence[str], step: int, attempt: int, stored: Sequence[Any]) -> MetricPoint:
    """The named values of one step; null where nothing was measured or it is not finite."""
    known = dict(zip(series.COLUMNS, stored, strict=False))
    seconds, tokens = (
        storable.number(known.get("step_time_s")),
        storable.number(known.get("tokens")),
    )
    known["tokens_per_second"] = tokens / seconds if seconds and tokens is not None else None
    values = {
        name: known.get(name) if name == "samples" else storable.number(known.get(name))
        for name in names
    }
    return MetricPoint(step=step, attempt=attempt, at=known["at"], values=values)


def thinned(rows: list[Row], most: int) -> list[Row]:
    """At most `most` of the rows, evenly spaced; the last one always, as it is the present."""
    stride = -(-len(rows) // max(1, most))
    return rows[::-1][:: max(1, stride)][::-1]
