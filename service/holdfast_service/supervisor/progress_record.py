"""How far the ranks of a job have come, as their agents told last. Soft state, for who watches.

No decision rests on it: what stands still is noticed by the agents themselves, and sooner.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from holdfast_workers.protocol.messages import Beat


class ProgressRecord:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reported: dict[str, tuple[float, tuple[Beat, ...]]] = {}  # seat -> when (monotonic)

    def update(self, seat: str, beats: tuple[Beat, ...]) -> None:
        """All ranks that the agent in this seat has."""
        with self._lock:
            self._reported[seat] = (time.monotonic(), beats)

    def for_attempt(self, attempt: int) -> tuple[Beat, ...]:
        """Of the ranks of this attempt, in their order; each as old as it is by now. A rank that
        two agents told of is the one's that told last."""
        now = time.monotonic()
        with self._lock:
            reported = sorted(self._reported.values(), key=lambda one: one[0])
        found = {
            beat.rank: replace(beat, age_s=beat.age_s + now - at)
            for at, beats in reported
            for beat in beats
            if beat.attempt == attempt
        }
        return tuple(found[rank] for rank in sorted(found))
