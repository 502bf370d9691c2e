"""How fast the supervisors of many jobs are polled: as is allowed, or as the rest leaves room.

A server has one loop for users and for polls. Where it is late, or has little time left, fewer
polls a second begin, and more again once it is not: users do not wait for them. Pure.
"""

from __future__ import annotations

_SLOW_DOWN, _SPEED_UP = 0.7, 1.15
_MIN_SHARE = 0.2
"""Of the polls that are allowed; so many are made however busy the server is."""
_BUSY_SHARE = 0.6
"""Of its time that the loop's thread computes; beyond that it is busy."""
_LATE_S = 0.005
"""On average. A loop that shares its processor with others is never busy by what it has computed;
but who comes to it waits."""


class PollRate:
    """Times at which polls may begin, one after the other."""

    def __init__(self, max_per_s: float) -> None:
        self._max_per_s = self.per_s = max_per_s
        self._next = 0.0

    def reserve(self, now: float) -> float:
        """Seconds from `now` until the next poll may begin; that time is taken then."""
        at = max(now, self._next)
        self._next = at + 1 / self.per_s
        return at - now

    def adjust(self, busy_share: float, late_s: float) -> None:
        """How much of its time the loop's thread has computed of late, and how late it was on
        average when something was due."""
        busy = busy_share > _BUSY_SHARE or late_s > _LATE_S
        per_s = self.per_s * (_SLOW_DOWN if busy else _SPEED_UP)
        self.per_s = min(self._max_per_s, max(_MIN_SHARE * self._max_per_s, per_s))
