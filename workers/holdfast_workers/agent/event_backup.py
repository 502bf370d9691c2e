"""Copies of the supervisor's numbered events, kept by agents for the next supervisor process."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from holdfast_workers.protocol.messages import SupervisorEvent

KEPT_EVENTS = 2_000
"""The number of events kept after they were stored elsewhere: a restarted supervisor reads its
history from them."""


class EventBackup:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[int, SupervisorEvent] = {}

    def keep(self, events: Iterable[SupervisorEvent]) -> None:
        """Keep `events` by their `seq`."""
        with self._lock:
            self._events |= {event.seq: event for event in events}

    def forget(self, acked: int) -> None:
        """Drop the oldest of the events up to number `acked`, which are stored elsewhere."""
        with self._lock:
            stored = sorted(seq for seq in self._events if seq <= acked)
            for seq in stored[:-KEPT_EVENTS]:
                del self._events[seq]

    def all(self) -> tuple[SupervisorEvent, ...]:
        """All kept events, in order of their numbers."""
        with self._lock:
            return tuple(self._events[seq] for seq in sorted(self._events))
