"""Converts series to pandas data frames, if pandas is installed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from holdfast_service.views.history import MetricPoint


def to_data_frame(points: Sequence[MetricPoint]) -> Any:
    """A DataFrame with a row per step (its index) and a column per metric, `attempt` and `at`
    (UTC) first; without pandas, the points as a list."""
    try:
        pandas = importlib.import_module("pandas")  # late: heavy and optional
    except ImportError:
        return list(points)
    rows = [{"attempt": point.attempt, "at": point.at, **point.values} for point in points]
    index = pandas.Index([point.step for point in points], name="step")
    frame = pandas.DataFrame(rows, index=index)
    if rows:
        frame["at"] = pandas.to_datetime(frame["at"], unit="s", utc=True)
    return frame
