"""Histogram of durations with fixed buckets, in the form that Prometheus expects. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate

BUCKETS_S = (0.001, 0.005, 0.02, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass
class Distribution:
    """`counts` per bucket of BUCKETS_S; the last count is for durations above every bound."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total_s: float = 0.0

    def add(self, taken_s: float) -> None:
        self.counts[bisect_left(BUCKETS_S, taken_s)] += 1
        self.total_s += taken_s

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, number of durations up to it): cumulative, as in Prometheus."""
        bounds = [*map(str, BUCKETS_S), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))
