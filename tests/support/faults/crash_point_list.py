"""Counting crash points. What each room must at least try in `make test` stands here, in one place.

A seed says which points a run takes where there are too many to take all; it is printed, and
`HOLDFAST_SEED` sets it. `make soak` repeats every room with other seeds.
"""

from __future__ import annotations

import os
import random
import time

import pytest

SOAK_RUNS = 10
AT_LEAST = {
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
assert sum(AT_LEAST.values()) >= 10_000
assert sum(least for room, least in AT_LEAST.items() if room.startswith("real processes")) >= 300


seeded_runs = pytest.mark.parametrize(
    "run", [0, *(pytest.param(run, marks=pytest.mark.soak) for run in range(1, SOAK_RUNS + 1))]
)


class Points:
    """The points of one room in one run."""

    def __init__(self, room: str, run: int) -> None:
        seed = int(os.environ.get("HOLDFAST_SEED", time.time_ns() % 1_000_000))
        print(f"HOLDFAST_SEED={seed}")
        self.room = room
        self.random = random.Random(f"{room} {seed} {run}")
        self.tried = 0

    def moments(self, count: int, within_s: float) -> list[float]:
        return [self.random.uniform(0, within_s) for _ in range(count)]

    def enough(self) -> None:
        print(f"{self.room}: {self.tried} points")
        assert self.tried >= AT_LEAST[self.room], f"only {self.tried} points in {self.room}"
