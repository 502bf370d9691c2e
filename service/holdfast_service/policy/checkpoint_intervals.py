"""Chooses the save interval of each tier set to `auto`, from its cost and the failure rate. Pure.

The interval that loses least is Young's (J. W. Young, "A first order approximation to the optimum
checkpoint interval", CACM 17(9), 1974), in Daly's higher-order form (J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006, eq. 37). Two
bounds apply: a tier never costs more than `overhead_target` of the time, and within that bound at
most `MAX_LOST_S` of work can be lost between two saves.

All functions are deterministic; the ranks act on one result, which they get through the agreement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil, sqrt
from statistics import median

from holdfast_workers.protocol.messages import StepRow, Tier
from holdfast_workers.spec import TrainingSpec

MAX_LOST_S = 1800.0
"""Most work that can be lost between two saves of a tier, unless `overhead_target` is too low for
so many saves."""
DAY_S = 86400.0
PRIOR_S = {"memory": 30 * DAY_S, "remote": 300 * DAY_S}
"""Prior mean time between failures per node: a node fails once in 30 days, and one failure in ten
destroys all copies in memory. The prior counts as much as one failure observed in that time."""
WINDOW = 64  # number of step times kept, with and without a save each
ENOUGH_STEPS = 8
EPISODES = 8  # number of remote saves whose costs are kept
ENOUGH_EPISODES = 3
WARM_UP_STEPS = 3
"""The first steps of an attempt compile, allocate and fill caches: they are not measured."""


class AutoTier(StrEnum):
    """A tier whose interval can be `auto`."""

    MEMORY = "memory"
    REMOTE = "remote"


@dataclass(frozen=True)
class IntervalChoice:
    """A chosen interval, and its inputs. Times in seconds."""

    tier: AutoTier
    every_steps: int
    why: str
    cost_s: float | None = None
    """Training time that one save costs."""
    mtbf_s: float | None = None
    """Mean time between failures that need this tier."""
    step_s: float | None = None


def auto_tiers(spec: TrainingSpec) -> frozenset[AutoTier]:
    """The tiers whose interval is `auto` in the spec."""
    checkpoint = spec.checkpoint
    every = {
        AutoTier.MEMORY: checkpoint.memory.every_steps,
        AutoTier.REMOTE: checkpoint.remote.every_steps,
    }
    return frozenset(tier for tier, steps in every.items() if steps == "auto")


def optimum_s(cost_s: float, mtbf_s: float) -> float:
    """The optimal time between two saves, in Daly's form; see the module's docstring."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    part = cost_s / (2 * mtbf_s)
    return sqrt(2 * cost_s * mtbf_s) * (1 + sqrt(part) / 3 + part / 9) - cost_s


def mean_time_between_failures_s(
    tier: AutoTier, failures: int, trained_s: float, nodes: int
) -> float:
    """Mean time between failures of the whole job, from `failures` in `trained_s` on `nodes` nodes.

    It is the mean of the posterior of a Poisson rate under a Gamma prior of one failure in
    `PRIOR_S` node-seconds: a few observations change it little, many outweigh it.
    """
    return (PRIOR_S[tier] + nodes * trained_s) / ((1 + failures) * nodes)


def choose_interval(
    tier: AutoTier, cost_s: float, mtbf_s: float, step_s: float, overhead_target: float
) -> IntervalChoice:
    """The interval in whole steps, with its reason."""
    best_s = optimum_s(cost_s, mtbf_s)
    least_s = cost_s / overhead_target
    wanted_s = max(least_s, min(best_s, MAX_LOST_S))
    least_steps = max(1, ceil(least_s / step_s))
    every = max(least_steps, int(wanted_s / step_s))
    basis = (
        f"a save costs {_time(cost_s)} of training, "
        f"failures that need it are expected {_time(mtbf_s)} apart"
    )
    if least_s > best_s or every == least_steps > 1:
        bound = f"the interval is the shortest that costs at most {overhead_target:.2%} of the time"
    elif best_s > MAX_LOST_S:
        bound = f"at most {_time(MAX_LOST_S)} of work may be lost"
    else:
        bound = f"a save every {_time(best_s)} loses the least time"
    return IntervalChoice(tier, every, f"{basis}: {bound}", cost_s, mtbf_s, step_s)


def doubled_interval(tier: AutoTier, every_steps: int) -> IntervalChoice:
    """Twice the interval, for when no step without a save can be measured."""
    why = (
        f"a save takes longer than the {every_steps} steps between two saves, so that its cost "
        "cannot be measured"
    )
    return IntervalChoice(tier, 2 * every_steps, why)


def needed_remote_tier(tiers: Iterable[str]) -> bool:
    """Whether an attempt started from a tier other than memory, so that memory was not enough."""
    return not {Tier.REMOTE, Tier.INIT}.isdisjoint(tiers)


def is_worth_changing(before: int, after: int) -> bool:
    """Whether a new interval differs by at least a fifth, so that a change is worth it."""
    return abs(after - before) * 5 >= before


@dataclass
class SaveCosts:
    """Measures the cost of saves from the rows of steps, with medians to ignore outliers.

    A memory save runs during the step after it: its cost is the extra time of such steps, and at
    least the time that training waited in them. A remote save runs during several steps: its cost
    is the sum of their extra time.
    """

    _plain: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _saved: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _waits: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _episodes: deque[float] = field(default_factory=lambda: deque(maxlen=EPISODES))
    _episode: list[StepRow] = field(default_factory=list)
    _attempt: int = 0
    _first: int = 0
    _last: int = 0

    def add_rows(self, rows: Iterable[StepRow]) -> None:
        """Add rows in ascending order. Known rows, and rows of older attempts, change nothing."""
        for row in rows:
            if row.attempt > self._attempt:
                self._attempt, self._first, self._last = row.attempt, row.step, row.step - 1
                self._episode.clear()
            if row.attempt < self._attempt or row.step <= self._last:
                continue
            self._last = row.step
            if row.step - self._first >= WARM_UP_STEPS:
                self._add_row(row)

    @property
    def step_s(self) -> float | None:
        """Median time of a step without a remote save."""
        times = [*self._plain, *self._saved]
        return median(times) if len(times) >= ENOUGH_STEPS else None

    @property
    def memory_s(self) -> float | None:
        """Cost of a memory save; None until enough steps with and without a save were seen."""
        if min(len(self._plain), len(self._saved)) < ENOUGH_STEPS:
            return None
        return max(median(self._saved) - median(self._plain), median(self._waits), 0.0)

    @property
    def remote_s(self) -> float | None:
        """Cost of a remote save; None until enough complete saves were seen."""
        if len(self._episodes) < ENOUGH_EPISODES or self.step_s is None:
            return None
        return median(self._episodes)

    def saves_overlap(self, every_steps: int) -> bool:
        """Whether remote saves follow each other without a pause, which makes them unmeasurable."""
        return len(self._episode) > 2 * every_steps

    def of(self, tier: AutoTier) -> float | None:
        return self.memory_s if tier is AutoTier.MEMORY else self.remote_s

    def _add_row(self, row: StepRow) -> None:
        if row.remote_saving:
            self._episode.append(row)
            return
        if self._episode and self.step_s is not None:
            self._episodes.append(_extra_time_s(self._episode, self.step_s))
        self._episode.clear()
        if row.memory_saved:
            self._saved.append(row.step_time_s)
            self._waits.append(row.checkpoint_wait_s)
        else:
            self._plain.append(row.step_time_s)


def _extra_time_s(episode: Sequence[StepRow], step_s: float) -> float:
    """Extra time of the steps of one remote save, but at least the time that training waited."""
    longer = sum(row.step_time_s - step_s for row in episode)
    waited = episode[0].checkpoint_wait_s
    return max(longer, waited, 0.0)


def _time(seconds: float) -> str:
    for unit, size in (("days", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
