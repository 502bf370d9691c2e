"""The ledger: which windows of data a run passes over, and so which one each step reads. Pure.

A window is the `global_batch` positions of the sample order that one step reads; windows count
from 0. Step s reads the s-th window that the ledger does not hold. So no sample is read twice or
lost, whatever is in the ledger: each is read once, or stands in it.

Of a ledger, a state holds what lies before the window it has read last. So a run that is told of
a window in advance and one that finds out have the same states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ledger:
    """`ranges`: half-open, ascending, with gaps between them. Make one with `of`."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[Sequence[int]]) -> Ledger:
        """The ledger of all windows in `ranges`, in any order, overlapping or not."""
        joined: list[tuple[int, int]] = []
        for start, end in sorted((int(one[0]), int(one[1])) for one in ranges):
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
        """What of it lies before the window that `step` has read; of step 0, nothing."""
        if step < 1:
            return Ledger()
        last = self.window(step)
        return Ledger(tuple(one for one in self.ranges if one[1] <= last))

    def count(self, start: int, end: int) -> int:
        """How many of the windows in [start, end) it holds."""
        return sum(max(0, min(end, b) - max(start, a)) for a, b in self.ranges)

    @property
    def windows(self) -> int:
        """How many windows it holds."""
        return sum(end - start for start, end in self.ranges)
