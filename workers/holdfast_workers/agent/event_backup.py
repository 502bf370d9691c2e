"""Copies of the supervisor's numbered events, kept by agents for the next supervisor process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

Events = Sequence[dict[str, Any]]

KEPT_EVENTS = 2_000
"""So many events are kept after they were stored elsewhere: a restarted supervisor reads its
history from them."""


class EventBackup:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[int, dict[str, Any]] = {}

    def keep(self, events: Events, acked: int = 0) -> None:
        """Keep `events` by their `seq`. Events up to number `acked` are stored elsewhere."""
        with self._lock:
            for event in events:
                self._events[event["seq"]] = event
            for seq in [seq for seq in self._events if seq <= acked - KEPT_EVENTS]:
                del self._events[seq]

    def all(self) -> list[dict[str, Any]]:
        """All kept events, in order of their numbers."""
        with self._lock:
            return [self._events[seq] for seq in sorted(self._events)]
