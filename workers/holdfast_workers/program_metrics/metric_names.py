"""The names that metrics of a user may have: each is a series of the job."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields

from holdfast_workers.protocol.messages import StepRow
from holdfast_workers.protocol.metrics import METRICS

MAX_NAMES = 32
"""Different names that one run of a program or function may use."""
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_./-]{0,63}")
RESERVED_NAMES = frozenset({*METRICS, *(field.name for field in fields(StepRow))})
"""Names of the values that Holdfast measures itself."""


class OwnMetrics:
    """Selects the metrics that can be stored, and counts the names used so far."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def storable(self, values: Mapping[str, float]) -> dict[str, float]:
        """The finite metrics with a valid name, of the first `MAX_NAMES` different names. A program
        that prints other values is not at fault: they are left out."""
        found = {}
        for name, value in values.items():
            if not math.isfinite(value) or name in RESERVED_NAMES or not NAME.fullmatch(name):
                continue
            if name not in self._names and len(self._names) >= MAX_NAMES:
                continue
            self._names.add(name)
            found[name] = value
        return found
