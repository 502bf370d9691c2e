"""Whether a program that shows no steps is at work: it prints, or it computes. Pure.

A rank that waits for its peers sleeps, but for threads that look at the time now and then.
"""

from __future__ import annotations

from dataclasses import dataclass

BUSY_SHARE = 0.05
"""A program that takes less of a processor's time than this does nothing."""


@dataclass
class Silence:
    """The signs of life of a program, as seen by one look after the other."""

    printed: int = 0
    """Bytes of output at the last look."""
    computed_s: float = 0.0
    """Processor time at the last look, in seconds."""
    looked_at: float = 0.0
    shown_at: float = 0.0
    """Time of the last look at which the program had printed, or of its last step."""

    def has_sign_of_life(self, printed: int, computed_s: float, now: float) -> bool:
        """Whether the program has printed or computed since the last look."""
        share = (computed_s - self.computed_s) / max(1e-9, now - self.looked_at)
        if printed != self.printed:
            self.shown_at = now
        alive = printed != self.printed or share >= BUSY_SHARE
        self.printed, self.computed_s, self.looked_at = printed, computed_s, now
        return alive
