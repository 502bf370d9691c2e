"""How long a client tries again while a server does not answer. Pure: the clock is passed in."""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


@dataclass
class Patience:
    """Counts from the first failure in a row; pauses double up to a limit."""

    limit_s: float
    _since: float | None = field(default=None, init=False)
    _pause_s: float = field(default=FIRST_PAUSE_S, init=False)

    def succeeded(self) -> None:
        """An answer came: the next failure is the first one again."""
        self._since, self._pause_s = None, FIRST_PAUSE_S

    def pause_s(self, now: float) -> float | None:
        """After a failure: how long to wait before the next try. None: no more of them."""
        if self._since is None:
            self._since = now
        left_s = self._since + self.limit_s - now
        if left_s <= 0:
            return None
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        return min(pause_s, left_s)
