"""Keeps the last reported progress of a job's ranks, for display only. Soft state.

No decision depends on it: the agents themselves detect stalled ranks, and sooner.
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
        self._reported: dict[str, tuple[float, tuple[Beat, ...]]] = {}
        """Seat -> (monotonic time of the report, beats)."""

    def add(self, seat: str, beats: tuple[Beat, ...]) -> None:
        """Replace the beats of all ranks of the agent in this seat."""
        with self._lock:
            self._reported[seat] = (time.monotonic(), beats)

    def for_attempt(self, attempt: int) -> tuple[Beat, ...]:
        """The beats of this attempt in rank order, with their present age.

        If two agents reported the same rank, the later report counts.
        """
        now = time.monotonic()
        with self._lock:
            reported = sorted(self._reported.values(), key=lambda report: report[0])
        found = {
            beat.rank: replace(beat, age_s=beat.age_s + now - at)
            for at, beats in reported
            for beat in beats
            if beat.attempt == attempt
        }
        return tuple(found[rank] for rank in sorted(found))
