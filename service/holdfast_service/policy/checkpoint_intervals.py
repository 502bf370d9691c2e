"""How often each tier is saved where the spec says `auto`: from what it costs and what fails. Pure.

The interval that loses least is Young's (J. W. Young, "A first order approximation to the optimum
checkpoint interval", CACM 17(9), 1974), in Daly's higher-order form (J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006, eq. 37). Two
bounds hold around it: a tier never costs more than `overhead_target` of the time, and within that
no more than `MOST_LOST_S` of work is ever at stake between two of its saves.

Every function gives the same answer wherever it is asked; what ranks do follows from one answer
that travels through the agreement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil, sqrt
from statistics import median
from typing import Any

from holdfast_workers.protocol.messages import StepRow, Tier
from holdfast_workers.spec import TrainingSpec

MOST_LOST_S = 1800.0
"""Work that may be lost between two saves of a tier, unless `overhead_target` forbids so many."""
DAY_S = 86400.0
PRIOR_S = {"memory": 30 * DAY_S, "remote": 300 * DAY_S}
"""What is believed before anything was seen: a node fails once in 30 days, and one failure in ten
takes all copies in memory with it. It weighs as much as one failure seen in that time."""
WINDOW = 64  # steps of each sort whose times are kept
ENOUGH_STEPS = 8
EPISODES = 8  # remote saves whose cost is kept
ENOUGH_EPISODES = 3
WARM_UP_STEPS = 3
"""The first steps of an attempt compile, allocate and fill caches: they measure nothing."""


class AutoTier(StrEnum):
    """A tier whose interval can be chosen here."""

    MEMORY = "memory"
    REMOTE = "remote"


@dataclass(frozen=True)
class Choice:
    """An interval, and what it follows from. Times in seconds."""

    tier: AutoTier
    every_steps: int
    why: str
    cost_s: float | None = None
    """What one save adds to training."""
    mtbf_s: float | None = None
    """Between two failures that this tier is for."""
    step_s: float | None = None

    def data(self) -> dict[str, Any]:
        """As an event tells it."""
        return {
            "tier": self.tier.value,
            "every_steps": self.every_steps,
            "cost_s": self.cost_s,
            "mtbf_s": self.mtbf_s,
            "step_s": self.step_s,
            "why": self.why,
        }


def auto_tiers(spec: TrainingSpec) -> frozenset[AutoTier]:
    """The tiers whose interval the spec leaves to be chosen."""
    checkpoint = spec.checkpoint
    every = {
        AutoTier.MEMORY: checkpoint.memory.every_steps,
        AutoTier.REMOTE: checkpoint.remote.every_steps,
    }
    return frozenset(tier for tier, steps in every.items() if steps == "auto")


def optimum_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between two saves that lose least; Daly's form, see the module."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    part = cost_s / (2 * mtbf_s)
    return sqrt(2 * cost_s * mtbf_s) * (1 + sqrt(part) / 3 + part / 9) - cost_s


def mean_time_between_failures_s(
    tier: AutoTier, failures: int, trained_s: float, nodes: int
) -> float:
    """Of the job, from `failures` in `trained_s` on `nodes` nodes.

    The mean of the posterior of a Poisson rate under a Gamma prior of one failure in `PRIOR_S`
    node-seconds: few data move it a little, many decide.
    """
    return (PRIOR_S[tier] + nodes * trained_s) / ((1 + failures) * nodes)


def choose(
    tier: AutoTier, cost_s: float, mtbf_s: float, step_s: float, overhead_target: float
) -> Choice:
    """The interval in whole steps, and why it is that."""
    best_s = optimum_s(cost_s, mtbf_s)
    least_s = cost_s / overhead_target
    wanted_s = max(least_s, min(best_s, MOST_LOST_S))
    least_steps = max(1, ceil(least_s / step_s))
    every = max(least_steps, int(wanted_s / step_s))
    basis = (
        f"a save costs {_time(cost_s)} of training, "
        f"failures that need it are expected {_time(mtbf_s)} apart"
    )
    if least_s > best_s or every == least_steps > 1:
        bound = f"it is made no more often than {overhead_target:.2%} of the time allows"
    elif best_s > MOST_LOST_S:
        bound = f"no more than {_time(MOST_LOST_S)} of work is to be at stake"
    else:
        bound = f"the least is lost with a save every {_time(best_s)}"
    return Choice(tier, every, f"{basis}: {bound}", cost_s, mtbf_s, step_s)


def spread(tier: AutoTier, every_steps: int) -> Choice:
    """Twice the interval, where no step without a save can be measured."""
    why = (
        f"saves last longer than the {every_steps} steps between them: there is nothing to compare"
    )
    return Choice(tier, 2 * every_steps, why)


def needed_remote(tiers: Iterable[str]) -> bool:
    """Whether memory alone could not give back what an attempt started from."""
    return not {Tier.REMOTE, Tier.INIT}.isdisjoint(tiers)


def differs(before: int, after: int) -> bool:
    """Whether a new interval is worth telling: by a fifth at least."""
    return abs(after - before) * 5 >= before


@dataclass
class Costs:
    """What saves cost training, from the rows of its steps; medians, so that hiccups do not count.

    A memory save is made beside the step after it: its cost is what such steps take longer, and
    at least what training waited in them. A remote save takes several steps: its cost is what
    they took longer, all together.
    """

    _plain: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _saved: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _waits: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _episodes: deque[float] = field(default_factory=lambda: deque(maxlen=EPISODES))
    _episode: list[StepRow] = field(default_factory=list)
    _attempt: int = 0
    _first: int = 0
    _last: int = 0

    def take(self, rows: Iterable[StepRow]) -> None:
        """Rows in ascending order; those known already, or of an older attempt, change nothing."""
        for row in rows:
            if row.attempt > self._attempt:
                self._attempt, self._first, self._last = row.attempt, row.step, row.step - 1
                self._episode.clear()
            if row.attempt < self._attempt or row.step <= self._last:
                continue
            self._last = row.step
            if row.step - self._first >= WARM_UP_STEPS:
                self._note(row)

    @property
    def step_s(self) -> float | None:
        """A step without a remote save beside it."""
        times = [*self._plain, *self._saved]
        return median(times) if len(times) >= ENOUGH_STEPS else None

    @property
    def memory_s(self) -> float | None:
        """None until enough steps with and without a save were seen."""
        if min(len(self._plain), len(self._saved)) < ENOUGH_STEPS:
            return None
        return max(median(self._saved) - median(self._plain), median(self._waits), 0.0)

    @property
    def remote_s(self) -> float | None:
        """None until enough saves were seen from their beginning to their end."""
        if len(self._episodes) < ENOUGH_EPISODES or self.step_s is None:
            return None
        return median(self._episodes)

    def is_crowded(self, every_steps: int) -> bool:
        """Whether one remote save follows on the other, so that nothing can be measured."""
        return len(self._episode) > 2 * every_steps

    def of(self, tier: AutoTier) -> float | None:
        return self.memory_s if tier is AutoTier.MEMORY else self.remote_s

    def _note(self, row: StepRow) -> None:
        if row.remote_saving:
            self._episode.append(row)
            return
        if self._episode and self.step_s is not None:
            self._episodes.append(_added(self._episode, self.step_s))
        self._episode.clear()
        if row.memory_saved:
            self._saved.append(row.step_time_s)
            self._waits.append(row.checkpoint_wait_s)
        else:
            self._plain.append(row.step_time_s)


def _added(episode: Sequence[StepRow], step_s: float) -> float:
    """What the steps of one remote save took longer than others, but no less than they waited."""
    longer = sum(row.step_time_s - step_s for row in episode)
    waited = episode[0].checkpoint_wait_s
    return max(longer, waited, 0.0)


def _time(seconds: float) -> str:
    for unit, size in (("days", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
