"""The areas of crash-point tests, and the number of points that each must try in `make test`.

Where there are too many points to try all of them, a seed selects those of a run. The seed is
printed, and `HOLDFAST_SEED` sets it. `make soak` repeats every area with other seeds.
"""

from __future__ import annotations

import os
import random
import time

import pytest

SOAK_RUNS = 10
MIN_POINTS = {
    "segments: killed or torn": 3000,
    "segments: flipped or cut": 5000,
    "data channel: replication": 1400,
    "data channel: fetch": 1200,
    "data channel: boxes": 400,
    "remote tier: killed, torn or lost": 900,
    "remote tier: flipped or cut": 900,
    "remote tier: flipped or cut before publication": 400,
    "real processes: workers": 120,
    "real processes: savers": 95,
    "real processes: partners": 15,
    "real processes: senders": 70,
}
assert sum(MIN_POINTS.values()) >= 10_000
assert sum(least for area, least in MIN_POINTS.items() if area.startswith("real processes")) >= 300


seeded_runs = pytest.mark.parametrize(
    "run", [0, *(pytest.param(run, marks=pytest.mark.soak) for run in range(1, SOAK_RUNS + 1))]
)


class CrashPoints:
    """Counts and randomly selects the crash points of one area in one run."""

    def __init__(self, area: str, run: int) -> None:
        seed = int(os.environ.get("HOLDFAST_SEED", time.time_ns() % 1_000_000))
        print(f"HOLDFAST_SEED={seed}")
        self.area = area
        self.random = random.Random(f"{area} {seed} {run}")
        self.tried = 0

    def moments(self, count: int, within_s: float) -> list[float]:
        """`count` random times between 0 and `within_s` seconds."""
        return [self.random.uniform(0, within_s) for _ in range(count)]

    def assert_enough(self) -> None:
        """Fail if the run tried fewer points than the area requires."""
        print(f"{self.area}: {self.tried} points")
        assert self.tried >= MIN_POINTS[self.area], f"only {self.tried} points in {self.area}"
