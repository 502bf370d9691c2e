"""The supervisor's numbered events, as its agents keep them for its next life."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

Events = Sequence[dict[str, Any]]

KEPT_EVENTS = 2_000
"""Stored events that are kept all the same: a restarted supervisor reads its history in them."""


class KeptEvents:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[int, dict[str, Any]] = {}

    def keep(self, events: Events, acked: int = 0) -> None:
        """Keep these, by their `seq`; those up to `acked` are stored elsewhere."""
        with self._lock:
            for event in events:
                self._events[event["seq"]] = event
            for seq in [seq for seq in self._events if seq <= acked - KEPT_EVENTS]:
                del self._events[seq]

    def all(self) -> list[dict[str, Any]]:
        """In order of number."""
        with self._lock:
            return [self._events[seq] for seq in sorted(self._events)]
