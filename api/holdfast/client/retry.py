"""Schedules a client's retries while a server does not answer. Pure: the clock is passed in."""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0


@dataclass
class RetrySchedule:
    """Limits the retries after the first failure in a row; pauses double up to a maximum."""

    limit_s: float
    _since: float | None = field(default=None, init=False)
    _pause_s: float = field(default=FIRST_PAUSE_S, init=False)

    def succeeded(self) -> None:
        """Reset after an answer: the next failure is the first one again."""
        self._since, self._pause_s = None, FIRST_PAUSE_S

    def pause_s(self, now: float) -> float | None:
        """The pause after a failure, before the next try. None: no more tries."""
        if self._since is None:
            self._since = now
        left_s = self._since + self.limit_s - now
        if left_s <= 0:
            return None
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, MAX_PAUSE_S)
        return min(pause_s, left_s)
