"""Numbers that a function tells of its steps: what they may be called, and what they may be."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Mapping

from torch import Tensor

from holdfast_workers.functions.function_errors import FunctionError

MOST = 32
"""Different names in one call of the function."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_./-]{0,63}")
TAKEN = frozenset(
    {
        *("at", "attempt", "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second"),
        *("step_time_s", "loader_wait_s", "checkpoint_wait_s", "compute_s", "samples"),
        *("digest", "protected_step", "mfu", "own"),
    }
)
"""Names of what the house measures itself."""


class OwnMetrics:
    """Knows which names there have been."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def checked(self, given: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Those that are finite: what is not finite was not measured. Raises FunctionError."""
        for name in given:
            _check_name(name)
        self._names |= set(given)
        if len(self._names) > MOST:
            raise FunctionError(
                f"step(metrics=...) was given more than {MOST} different names: a name is a "
                "series, so it must not contain the step or a sample"
            )
        values = {name: _number(name, value) for name, value in given.items()}
        return {name: value for name, value in values.items() if math.isfinite(value)}


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise FunctionError(
            f"{name!r} is no name for a metric: up to 64 letters, digits and any of _ . / -, "
            "a letter first"
        )
    if name in TAKEN:
        raise FunctionError(f"{name!r} is measured by Holdfast itself: choose another name")


def _number(name: str, value: object) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach())
    if isinstance(value, numbers.Real):  # NumPy's and Python's own
        return float(value)
    raise FunctionError(
        f"the metric {name!r} is a {type(value).__qualname__}: give a number, or a tensor of one "
        "element"
    )
