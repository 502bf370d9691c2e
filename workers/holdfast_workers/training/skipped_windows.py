"""The ledger of skipped data windows, which determines the window that each step reads. Pure.

A window is the `global_batch` positions of the sample order that one step reads; windows count
from 0. Step s reads the s-th window that is not in the ledger. So every sample is either read
exactly once or is in the ledger, whatever the ledger contains.

A state stores the part of the ledger before the window that it read last. So a run that knows a
skipped window in advance and a run that discovers it have the same states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ledger:
    """`ranges` are half-open, ascending, with gaps between them. `Ledger.of` creates a ledger."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[Sequence[int]]) -> Ledger:
        """The ledger of all windows in `ranges`, which may overlap and be in any order."""
        joined: list[tuple[int, int]] = []
        for start, end in sorted((int(pair[0]), int(pair[1])) for pair in ranges):
            if start < 0:
                raise ValueError(f"windows count from 0; there is no window {start}")
            if start >= end:
                continue
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], end))
            else:
                joined.append((start, end))
        return cls(tuple(joined))

    def __or__(self, other: Ledger) -> Ledger:
        return Ledger.of((*self.ranges, *other.ranges))

    def __contains__(self, window: int) -> bool:
        return any(start <= window < end for start, end in self.ranges)

    def window(self, step: int) -> int:
        """The window that `step` reads (1 is the first step)."""
        window = step - 1
        for start, end in self.ranges:
            if start > window:
                break
            window += end - start
        return window

    def passed(self, step: int) -> Ledger:
        """The part of the ledger before the window that `step` reads; empty for step 0."""
        if step < 1:
            return Ledger()
        last = self.window(step)
        return Ledger(tuple((start, end) for start, end in self.ranges if end <= last))

    def count(self, start: int, end: int) -> int:
        """The number of windows in [start, end) that the ledger holds."""
        return sum(max(0, min(end, b) - max(start, a)) for a, b in self.ranges)

    @property
    def windows(self) -> int:
        """The number of windows that the ledger holds."""
        return sum(end - start for start, end in self.ranges)
