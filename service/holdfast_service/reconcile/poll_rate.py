"""Adapts the rate of supervisor polls to the load of the event loop. Pure.

A server has one event loop for user requests and for polls. A busy or late loop starts fewer polls
per second, an idle loop more, up to the allowed rate; user requests do not wait for polls.
"""

from __future__ import annotations

_SLOW_DOWN, _SPEED_UP = 0.7, 1.15
_MIN_SHARE = 0.2
"""Share of the allowed rate that is kept however busy the server is."""
_BUSY_SHARE = 0.6
"""The loop is busy if its thread computes for more than this share of the time."""
_LATE_S = 0.005
"""The loop is late if its callbacks start later than this on average. A loop that shares its
processor may compute little, yet its requests wait."""


class PollRate:
    """Assigns start times to polls, one after the other."""

    def __init__(self, max_per_s: float) -> None:
        self._max_per_s = self.per_s = max_per_s
        self._next = 0.0

    def reserve(self, now: float) -> float:
        """Reserve the next start time; returns the seconds from `now` until then."""
        at = max(now, self._next)
        self._next = at + 1 / self.per_s
        return at - now

    def adjust(self, busy_share: float, late_s: float) -> None:
        """Adapt the rate to the loop's recent share of computing time and average lateness."""
        busy = busy_share > _BUSY_SHARE or late_s > _LATE_S
        per_s = self.per_s * (_SLOW_DOWN if busy else _SPEED_UP)
        self.per_s = min(self._max_per_s, max(_MIN_SHARE * self._max_per_s, per_s))
