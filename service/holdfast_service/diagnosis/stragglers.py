"""Finds ranks that compute more slowly than their peers, and since which step. Pure.

A rank's time without waiting is compared with the median of the *other* ranks in the same steps, so
that a slowdown of all ranks counts for none; in a pipeline, with the others of its stage, because
stages have different work (the only rank of a stage has no peers). A rank is slow once the median
of its ratios over a window is far above one: by `FACTOR`, and by more standard errors of a median
than a healthy job with this noise ever reaches (longer windows detect smaller effects in more
noise). The start is the change point that fits the series best by least absolute deviations. All
statistics are medians, so that a few long steps on a rank (a checkpoint, a garbage collection) have
no effect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, log, sqrt
from statistics import fmean, median

from holdfast_workers.protocol.messages import StepRow

FACTOR = 1.5
"""Slowness above this factor is reported; the usual unevenness of a mesh's ranks is below it."""
RECOVERED_FACTOR = 1.2
DEVIATIONS = 8.0
MIN_SLOW_SHARE = 0.75
"""A rank must be slow in more than this share of a window: a few long steps are not enough."""
WINDOWS = (8, 16, 32, 64)
"""Window lengths, in samples."""
SAMPLE_S = 0.25
"""A sample is at least one step and at least this long: shorter times depend more on the machine's
scheduler than on the rank."""
WARM_UP_STEPS = 3
"""The first steps of an attempt compile, allocate and fill caches."""
MIN_SPREAD = 0.02
MEDIAN_TO_MEAN_ERROR = 1.2533
"""The standard error of a median over that of a mean."""
MAD_TO_STANDARD_DEVIATION = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True)
class Straggler:
    """A rank that takes `factor` times as long as its peers, since `since_step`."""

    rank: int
    factor: float
    since_step: int
    step: int
    """The step at which it was detected."""
    recovered: bool = False


class PeerTimes:
    """The step times of a job's ranks, attempt by attempt."""

    def __init__(self) -> None:
        self.slow: dict[int, Straggler] = {}
        """The ranks that are slow now."""
        self._attempt = 0
        self._first_step = 0
        self._last_step = 0
        self._open: list[StepRow] = []
        self._steps: deque[int] = deque(maxlen=WINDOWS[-1])
        self._ratios: list[deque[float]] = []

    def add_row(self, row: StepRow, stages: int = 1) -> list[Straggler]:
        """Add a step; returns the ranks that became slow or recovered. Known steps are ignored.
        `stages`: number of equal groups of ranks, in rank order, that only compare among
        themselves."""
        if (row.attempt, row.step) <= (self._attempt, self._last_step):
            return []
        if row.attempt != self._attempt or len(row.compute_s) != len(self._ratios):
            self._begin(row)
        self._last_step = row.step
        if row.step < self._first_step + WARM_UP_STEPS or min(row.compute_s, default=0.0) <= 0.0:
            return []
        self._open.append(row)
        if sum(step.step_time_s for step in self._open) < SAMPLE_S:
            return []
        times = [fmean(rank) for rank in zip(*(step.compute_s for step in self._open), strict=True)]
        self._steps.append(self._open[0].step)
        self._open = []
        for ratios, ratio in zip(self._ratios, _against_peers(times, stages), strict=True):
            ratios.append(log(ratio))
        return self._changes(row.step)

    def remember(self, straggler: Straggler) -> None:
        """Record that the rank was slow before the first step that is added."""
        self.slow[straggler.rank] = straggler

    def forget(self, rank: int) -> None:
        """Clear the state of a rank that moved to another process on another node."""
        self.slow.pop(rank, None)

    def _begin(self, row: StepRow) -> None:
        self._attempt, self._first_step = row.attempt, row.step
        self._open = []
        self._steps.clear()
        kept = len(row.compute_s) if len(row.compute_s) > 1 else 0
        self._ratios = [deque(maxlen=WINDOWS[-1]) for _ in range(kept)]

    def _changes(self, step: int) -> list[Straggler]:
        found: list[Straggler] = []
        for rank, ratios in enumerate(self._ratios):
            if len(ratios) < WINDOWS[0]:
                break
            recent = median(list(ratios)[-WINDOWS[0] :])
            before = self.slow.get(rank)
            if before is not None and recent < log(RECOVERED_FACTOR):
                del self.slow[rank]
                found.append(replace(before, step=step, recovered=True))
            elif before is None and recent >= log(FACTOR) and self._stands_out(rank):
                self.slow[rank] = straggler = self._measure(rank, step)
                found.append(straggler)
        return found

    def _stands_out(self, rank: int) -> bool:
        mine = list(self._ratios[rank])
        for size in WINDOWS:
            if size > len(mine):
                return False
            window = mine[-size:]
            middle = median(window)
            slow = sum(ratio >= log(RECOVERED_FACTOR) for ratio in window)
            if middle < log(FACTOR) or slow <= MIN_SLOW_SHARE * size:
                continue
            if middle >= DEVIATIONS * MEDIAN_TO_MEAN_ERROR * self._spread(rank, size) / sqrt(size):
                return True
        return False

    def _spread(self, rank: int, size: int) -> float:
        """Standard deviation of a sample from its rank's median: the largest of that of this rank,
        that of all ranks in this window, and that between successive samples. With few samples the
        estimate is uncertain, and is increased."""
        series = list(self._ratios[rank])
        alone = median(_deviations(series[-size:]))
        pooled = median(
            deviation for kept in self._ratios for deviation in _deviations(list(kept)[-size:])
        )
        steps = median(abs(b - a) for a, b in pairwise(series)) / sqrt(2.0)
        uncertainty = 1.0 + WINDOWS[0] / len(series)
        return max(MIN_SPREAD, uncertainty * MAD_TO_STANDARD_DEVIATION * max(alone, pooled, steps))

    def _measure(self, rank: int, step: int) -> Straggler:
        series = list(self._ratios[rank])
        start = change_point(series)
        factor = exp(median(series[start:]))
        return Straggler(rank, round(factor, 3), self._steps[start], step)


def change_point(series: Sequence[float]) -> int:
    """Index at which the series rises to its last level; 0 if it has a single level or falls. By
    least absolute deviations from the medians of both parts."""

    def cost(start: int) -> float:
        parts = (series[:start], series[start:])
        return sum(sum(_deviations(part)) for part in parts if part)

    best = min(range(len(series)), key=lambda start: (cost(start), start))
    if best and median(series[best:]) <= median(series[:best]):
        return 0
    return best


def _against_peers(times: Sequence[float], stages: int) -> list[float]:
    """Each value over the median of the others of its stage."""
    size = len(times) // stages
    if size == 1:
        return [1.0] * len(times)
    groups = (times[start : start + size] for start in range(0, len(times), size))
    return [ratio for group in groups for ratio in _against_others(group)]


def _against_others(times: Sequence[float]) -> list[float]:
    """Each value over the (lower) median of the others."""
    ordered = sorted(times)
    middle = (len(times) - 2) // 2
    return [time / ordered[middle + (time <= ordered[middle])] for time in times]


def _deviations(values: Sequence[float]) -> list[float]:
    middle = median(values)
    return [abs(value - middle) for value in values]
