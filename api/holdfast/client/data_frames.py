"""Series as pandas has them, where pandas is installed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from holdfast_service.views.jobs import MetricPoint


def framed(points: Sequence[MetricPoint]) -> Any:
    """A DataFrame with a row per step (its index) and a column per metric, `attempt` and `at`
    (UTC) first; the points themselves, as a list, where there is no pandas."""
    try:
        pandas = importlib.import_module("pandas")  # late: it is heavy, and need not be there
    except ImportError:
        return list(points)
    rows = [{"attempt": point.attempt, "at": point.at, **point.values} for point in points]
    index = pandas.Index([point.step for point in points], name="step")
    frame = pandas.DataFrame(rows, index=index)
    if rows:
        frame["at"] = pandas.to_datetime(frame["at"], unit="s", utc=True)
    return frame
