"""What is computed from the measurements. Pure: values in, values out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class AppliedStep:
    """A step that a world applied. `world` grows by one with each world that was formed."""

    world: int
    step: int
    at: float


@dataclass(frozen=True)
class MeasuredFault:
    """One SIGKILL and what it cost, in seconds from the kill.

    `recovery_s` ends with the first step of a new world whose number goes beyond every step that
    the old world has applied, even those that were in flight when the kill came.
    """

    rank: int
    last_step: int
    restored_step: int | None
    recovery_s: float
    phases_s: Mapping[str, float]


@dataclass(frozen=True)
class MeasuredSpread:
    """Median, least and greatest of some measurements."""

    median: float
    least: float
    greatest: float
    count: int

    def __str__(self) -> str:
        return (
            f"median {self.median:.3f} s, min {self.least:.3f} s, max {self.greatest:.3f} s "
            f"({self.count})"
        )


def spread(values: Iterable[float]) -> MeasuredSpread:
    """Raises ValueError if there is nothing to measure."""
    found = sorted(values)
    if not found:
        raise ValueError("no measurement")
    return MeasuredSpread(median(found), found[0], found[-1], len(found))


def last_step(commits: Sequence[AppliedStep], killed_at: float) -> int:
    """The last step of the world that was hit; its commits after the kill count too."""
    hit = max((commit.world for commit in commits if commit.at <= killed_at), default=0)
    return max((commit.step for commit in commits if commit.world <= hit), default=0)


def recovered_at(commits: Sequence[AppliedStep], killed_at: float) -> float | None:
    """When a new world first went beyond the last step before the kill; None: not yet."""
    hit = max((commit.world for commit in commits if commit.at <= killed_at), default=0)
    reached = last_step(commits, killed_at)
    beyond = [c.at for c in commits if c.world > hit and c.step > reached]
    return min(beyond, default=None)


def median_phases(phases: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Median of each phase over the incidents that measured it, in the order first seen."""
    names = list(dict.fromkeys(name for item in phases for name in item))
    found: dict[str, float] = {}
    for name in names:
        values = [value for phase in phases if (value := phase.get(name)) is not None]
        if values:
            found[name] = round(median(values), 4)
    return found


def recovery_summary(
    holdfast: Sequence[MeasuredFault], ray_train: Mapping[str, Sequence[MeasuredFault]]
) -> dict[str, Any]:
    """The last line of `benchmarks.recovery`: Ray Train is judged by its better setting.

    `least_ratio` sets Ray Train's quickest recovery against Holdfast's slowest.
    """
    ours = spread(fault.recovery_s for fault in holdfast)
    theirs = {
        name: spread(fault.recovery_s for fault in faults) for name, faults in ray_train.items()
    }
    best = min(theirs, key=lambda name: theirs[name].median)
    return {
        "holdfast_s": round(ours.median, 4),
        "ray_train_s": round(theirs[best].median, 4),
        "ratio": round(theirs[best].median / ours.median, 2),
        "phases_s": median_phases([fault.phases_s for fault in holdfast]),
        "least_ratio": round(min(their.least for their in theirs.values()) / ours.greatest, 2),
        "holdfast_min_max_s": [round(ours.least, 4), round(ours.greatest, 4)],
        "ray_train_setting": best,
        "ray_train_by_setting": {
            name: {
                "median_s": round(one.median, 4),
                "min_max_s": [round(one.least, 4), round(one.greatest, 4)],
                "ratio": round(one.median / ours.median, 2),
            }
            for name, one in theirs.items()
        },
        "faults": {"holdfast": len(holdfast), **{n: len(f) for n, f in ray_train.items()}},
    }


def steady(step_times_s: Sequence[float], skip: int, count: int) -> list[float]:
    """`count` step times after the first `skip`, which compile, allocate and fill caches."""
    return list(step_times_s[skip : skip + count])


def overhead_summary(
    holdfast: Sequence[Sequence[float]], bare: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """The last line of `benchmarks.overhead`, from each run's steady step times.

    The runs take turns, a bare one first and last, so `bare` has one more. Each of Holdfast's is
    compared with the mean of its two neighbours, which takes out a machine that grows slower or
    faster; `ratio` is the median of these `round_ratios`.
    """
    ours = [median(item) for item in holdfast]
    theirs = [median(entry) for entry in bare]
    if len(theirs) != len(ours) + 1:
        raise ValueError(f"{len(ours)} runs need {len(ours) + 1} bare ones around them")
    ratios = [
        2 * one / (before + after)
        for one, before, after in zip(ours, theirs, theirs[1:], strict=False)
    ]
    return {
        "ratio": round(median(ratios), 4),
        "round_ratios": [round(ratio, 4) for ratio in ratios],
        "holdfast_step_s": [round(our, 6) for our in ours],
        "bare_step_s": [round(their, 6) for their in theirs],
        "steps": {"holdfast": sum(map(len, holdfast)), "bare": sum(map(len, bare))},
    }


@dataclass(frozen=True)
class StormFigure:
    """One side under one rate of kills. `step_s` and what `efficiency` is a share of are measured
    on the same ranks without any."""

    step_s: float
    efficiency: float
    kills: int


def storm_limit(step_s: float, mtbf_s: float) -> float:
    """What a synchronous scheme commits at most, as a share: a step counts if nothing fails in it,
    and what is lost with a failed one takes the time until the failure."""
    ratio = step_s / mtbf_s
    return ratio / math.expm1(ratio)


def storm_summary(
    ours: Mapping[str, StormFigure],
    theirs: Mapping[str, StormFigure],
    steps_between: Mapping[str, float],
) -> dict[str, Any]:
    """The last line of `benchmarks.storm`, by the rounded number of steps between two kills. The
    limit is that of each side's own step, M the same seconds for both."""
    limits = {
        name: storm_limit(figure.step_s, steps_between[name]) for name, figure in ours.items()
    }
    return {
        **{f"efficiency_vs_limit_{n}": round(ours[n].efficiency / limits[n], 3) for n in ours},
        **{
            f"efficiency_vs_torchft_{n}": round(ours[n].efficiency / theirs[n].efficiency, 2)
            for n in ours
        },
        "efficiency": {name: round(figure.efficiency, 3) for name, figure in ours.items()},
        "torchft": {name: round(figure.efficiency, 3) for name, figure in theirs.items()},
        "limit": {name: round(limit, 3) for name, limit in limits.items()},
        "kills": {name: [ours[name].kills, theirs[name].kills] for name in ours},
    }
