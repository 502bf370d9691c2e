"""Counts samples in batches of any shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def samples_of(batch: Any) -> int:
    """The number of samples in a batch: the length of the first tensor in it; 0 if it has none."""
    if hasattr(batch, "shape"):
        return int(batch.shape[0]) if len(batch.shape) else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return next((count for part in batch if (count := samples_of(part))), 0)
    return 0
