"""The metrics that a function reports with its steps: valid names and valid values."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping

from torch import Tensor

from holdfast_workers.functions.function_errors import FunctionError
from holdfast_workers.program_metrics.metric_names import MAX_NAMES, NAME, RESERVED_NAMES


class UserMetrics:
    """Validates the metrics of each step and counts the names used so far."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def validated(self, metrics: Mapping[str, float | Tensor]) -> dict[str, float]:
        """The finite metrics; a value that is not finite is left out. Raises FunctionError."""
        for name in metrics:
            _check_name(name)
        self._names |= set(metrics)
        if len(self._names) > MAX_NAMES:
            raise FunctionError(
                f"step(metrics=...) was given more than {MAX_NAMES} different names: a name is a "
                "series, so it must not contain the step or a sample"
            )
        values = {name: _number(name, value) for name, value in metrics.items()}
        return {name: value for name, value in values.items() if math.isfinite(value)}


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise FunctionError(
            f"{name!r} is not a valid metric name: use up to 64 letters, digits and any of "
            "_ . / -, beginning with a letter"
        )
    if name in RESERVED_NAMES:
        raise FunctionError(f"{name!r} is measured by Holdfast itself: choose another name")


def _number(name: str, value: object) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach())
    if isinstance(value, numbers.Real):  # NumPy's and Python's own
        return float(value)
    raise FunctionError(
        f"the metric {name!r} is a {type(value).__qualname__}: pass a number, or a tensor of one "
        "element"
    )
