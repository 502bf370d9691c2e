"""Which ranks compute more slowly than their peers, and since when. Pure: times in, changes out.

A rank's time without waiting is set against the median of the *other* ranks' in the same steps, so
that what slows all of them slows nobody. It is slow once the median of its ratios over some window
is far above one: by `FACTOR`, and by so many standard errors of a median that no healthy job of
this noise comes there (longer windows see less in more noise). Where it began is the change point
that fits its series best by least absolute deviations. Medians throughout, so that a few steps that
take long on some rank (a checkpoint, a garbage collection) mean nothing.
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
"""Slower than that is told. What is merely uneven, like the ranks of a mesh, is not."""
RECOVERED_FACTOR = 1.2
DEVIATIONS = 8.0
MOST_OF = 0.75
"""In more of a window than that the rank must be slow: some long steps are no slow rank."""
WINDOWS = (8, 16, 32, 64)
"""Samples that are looked at together."""
SAMPLE_S = 0.25
"""A sample is at least a step, and so many seconds: what is shorter says more of the scheduler of
the machine than of the rank."""
WARM_UP_STEPS = 3
"""The first steps of an attempt compile, allocate and fill caches."""
LEAST_SPREAD = 0.02
OF_MEDIAN = 1.2533
"""The standard error of a median over that of a mean."""
OF_DEVIATION = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True)
class Straggler:
    """A rank that takes `factor` times as long as its peers, since `since_step`."""

    rank: int
    factor: float
    since_step: int
    step: int
    """When that was noticed."""
    recovered: bool = False


class PeerTimes:
    """What the ranks of one job took, attempt by attempt."""

    def __init__(self) -> None:
        self.slow: dict[int, Straggler] = {}
        """The ranks that are slow at present."""
        self._attempt = 0
        self._first_step = 0
        self._last_step = 0
        self._open: list[StepRow] = []
        self._steps: deque[int] = deque(maxlen=WINDOWS[-1])
        self._ratios: list[deque[float]] = []

    def take(self, row: StepRow) -> list[Straggler]:
        """A step, once more or for the first time; who became slow by it, or recovered."""
        if (row.attempt, row.step) <= (self._attempt, self._last_step):
            return []
        if row.attempt != self._attempt or len(row.compute_s) != len(self._ratios):
            self._begin(row)
        self._last_step = row.step
        if row.step < self._first_step + WARM_UP_STEPS or min(row.compute_s, default=0.0) <= 0.0:
            return []
        self._open.append(row)
        if sum(one.step_time_s for one in self._open) < SAMPLE_S:
            return []
        times = [fmean(one) for one in zip(*(one.compute_s for one in self._open), strict=True)]
        self._steps.append(self._open[0].step)
        self._open = []
        for ratios, ratio in zip(self._ratios, _against_others(times), strict=True):
            ratios.append(log(ratio))
        return self._changes(row.step)

    def forget(self, rank: int) -> None:
        """Another process, on another node, has the rank."""
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
                self.slow[rank] = one = self._described(rank, step)
                found.append(one)
        return found

    def _stands_out(self, rank: int) -> bool:
        mine = list(self._ratios[rank])
        for size in WINDOWS:
            if size > len(mine):
                return False
            window = mine[-size:]
            middle = median(window)
            slow = sum(one >= log(RECOVERED_FACTOR) for one in window)
            if middle < log(FACTOR) or slow <= MOST_OF * size:
                continue
            if middle >= DEVIATIONS * OF_MEDIAN * self._spread(rank, size) / sqrt(size):
                return True
        return False

    def _spread(self, rank: int, size: int) -> float:
        """How far a sample lies from its rank's median, as a standard deviation: of this rank or of
        all, in this window or from one sample to the next in all that is kept, whichever is most.
        Of few samples it is known badly, and taken for more."""
        series = list(self._ratios[rank])
        alone = median(_deviations(series[-size:]))
        pooled = median(one for kept in self._ratios for one in _deviations(list(kept)[-size:]))
        steps = median(abs(b - a) for a, b in pairwise(series)) / sqrt(2.0)
        doubt = 1.0 + WINDOWS[0] / len(series)
        return max(LEAST_SPREAD, doubt * OF_DEVIATION * max(alone, pooled, steps))

    def _described(self, rank: int, step: int) -> Straggler:
        series = list(self._ratios[rank])
        start = change_point(series)
        factor = exp(median(series[start:]))
        return Straggler(rank, round(factor, 3), self._steps[start], step)


def change_point(series: Sequence[float]) -> int:
    """Where the last stretch of a series begins that has one level and is higher than what was
    before; 0 if all of it has one. By least absolute deviations from the medians of both parts."""

    def cost(start: int) -> float:
        parts = (series[:start], series[start:])
        return sum(sum(_deviations(part)) for part in parts if part)

    best = min(range(len(series)), key=lambda start: (cost(start), start))
    if best and median(series[best:]) <= median(series[:best]):
        return 0
    return best


def _against_others(times: Sequence[float]) -> list[float]:
    """Each over the (lower) median of the others."""
    ordered = sorted(times)
    middle = (len(times) - 2) // 2
    return [one / ordered[middle + (one <= ordered[middle])] for one in times]


def _deviations(values: Sequence[float]) -> list[float]:
    middle = median(values)
    return [abs(one - middle) for one in values]
