"""The figures computed from measurements; pure functions without I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class AppliedStep:
    """A step applied by a world. `world` grows by one with each world that is formed."""

    world: int
    step: int
    at: float


@dataclass(frozen=True)
class MeasuredFault:
    """One SIGKILL and its cost, in seconds from the kill.

    `recovery_s` ends with the first step of a new world whose number exceeds every step applied
    by the old world, including steps in flight at the time of the kill.
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
    """Spread of `values`; raises ValueError if there are none."""
    found = sorted(values)
    if not found:
        raise ValueError("no measurement")
    return MeasuredSpread(median(found), found[0], found[-1], len(found))


def last_step(commits: Sequence[AppliedStep], killed_at: float) -> int:
    """The last step of the world that was killed; its commits after the kill count too."""
    killed_world = max((commit.world for commit in commits if commit.at <= killed_at), default=0)
    return max((commit.step for commit in commits if commit.world <= killed_world), default=0)


def recovered_at(commits: Sequence[AppliedStep], killed_at: float) -> float | None:
    """Time at which a new world first exceeded the last step before the kill; None: not yet."""
    killed_world = max((commit.world for commit in commits if commit.at <= killed_at), default=0)
    reached = last_step(commits, killed_at)
    beyond = [c.at for c in commits if c.world > killed_world and c.step > reached]
    return min(beyond, default=None)


def median_phases(phases: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Median of each phase over the incidents that measured it, in the order first seen."""
    names = list(dict.fromkeys(name for phase in phases for name in phase))
    found: dict[str, float] = {}
    for name in names:
        values = [value for phase in phases if (value := phase.get(name)) is not None]
        if values:
            found[name] = round(median(values), 4)
    return found


@dataclass(frozen=True)
class SideFigures:
    """The recoveries of one side, in seconds: median, least and greatest, and each phase's
    median."""

    median_s: float
    min_max_s: list[float]
    phases_s: dict[str, float]
    faults: int


def side_figures(faults: Sequence[MeasuredFault]) -> SideFigures:
    found = spread(fault.recovery_s for fault in faults)
    return SideFigures(
        median_s=round(found.median, 4),
        min_max_s=[round(found.least, 4), round(found.greatest, 4)],
        phases_s=median_phases([fault.phases_s for fault in faults]),
        faults=found.count,
    )


@dataclass(frozen=True)
class RecoveryResult:
    """The last line of `benchmarks.recovery`. `ratio` compares the medians, with Ray Train at its
    better setting; `least_ratio` divides Ray Train's fastest recovery by Holdfast's slowest. None:
    Ray Train was left out."""

    ratio: float | None
    least_ratio: float | None
    ray_train_setting: str | None
    holdfast: SideFigures
    ray_train: dict[str, SideFigures]


def recovery_summary(
    holdfast: Sequence[MeasuredFault], ray_train: Mapping[str, Sequence[MeasuredFault]]
) -> RecoveryResult:
    ours = side_figures(holdfast)
    theirs = {name: side_figures(faults) for name, faults in ray_train.items()}
    best = min(theirs, key=lambda name: theirs[name].median_s, default=None)
    least = min((their.min_max_s[0] for their in theirs.values()), default=None)
    return RecoveryResult(
        ratio=None if best is None else round(theirs[best].median_s / ours.median_s, 2),
        least_ratio=None if least is None else round(least / ours.min_max_s[1], 2),
        ray_train_setting=best,
        holdfast=ours,
        ray_train=theirs,
    )


def steady(step_times_s: Sequence[float], skip: int, count: int) -> list[float]:
    """`count` step times after the first `skip`, which compile, allocate and fill caches."""
    return list(step_times_s[skip : skip + count])


@dataclass(frozen=True)
class OverheadResult:
    """The last line of `benchmarks.overhead`. `cpu_share`: cores used by each kind of other
    process in the last round."""

    ratio: float
    round_ratios: list[float]
    holdfast_step_s: list[float]
    bare_step_s: list[float]
    steps: dict[str, int]
    cpu_share: dict[str, float]
    check_share: float
    """Of the checks for silent corruption, in the rest of a step of two replicas."""


def overhead_summary(
    holdfast: Sequence[Sequence[float]],
    bare: Sequence[Sequence[float]],
    cpu_share: Mapping[str, float],
    check_share: float,
) -> OverheadResult:
    """From each run's steady step times.

    The runs alternate, with a bare run first and last, so `bare` has one more. Each Holdfast run is
    compared with the mean of its two neighbours, which cancels a slow drift of the machine's speed;
    `ratio` is the median of these `round_ratios`.
    """
    ours = [median(times) for times in holdfast]
    theirs = [median(times) for times in bare]
    if len(theirs) != len(ours) + 1:
        raise ValueError(f"{len(ours)} runs need {len(ours) + 1} bare ones around them")
    ratios = [
        2 * own / (before + after)
        for own, before, after in zip(ours, theirs, theirs[1:], strict=False)
    ]
    return OverheadResult(
        ratio=round(median(ratios), 4),
        round_ratios=[round(ratio, 4) for ratio in ratios],
        holdfast_step_s=[round(our, 6) for our in ours],
        bare_step_s=[round(their, 6) for their in theirs],
        steps={"holdfast": sum(map(len, holdfast)), "bare": sum(map(len, bare))},
        cpu_share=dict(cpu_share),
        check_share=round(check_share, 5),
    )


@dataclass(frozen=True)
class StormFigure:
    """One side at one kill rate. `step_s` and the baseline of `efficiency` are measured on the same
    ranks without kills."""

    step_s: float
    efficiency: float
    kills: int


def storm_limit(step_s: float, mtbf_s: float) -> float:
    """The largest share of steps that a synchronous scheme can commit: a step counts if nothing
    fails during it, and a failed step costs the time until its failure."""
    ratio = step_s / mtbf_s
    return ratio / math.expm1(ratio)


@dataclass(frozen=True)
class StormRate:
    """One kill rate. `of_limit` and `of_torchft` are relative to the limit and to torchft's
    efficiency; None: torchft was left out, or has committed no step."""

    holdfast: StormFigure
    torchft: StormFigure | None
    limit: float
    of_limit: float
    of_torchft: float | None


@dataclass(frozen=True)
class StormResult:
    """The last line of `benchmarks.storm`, by the rounded number of steps between two kills."""

    rates: dict[str, StormRate]


def storm_rate(ours: StormFigure, theirs: StormFigure | None, mtbf_s: float) -> StormRate:
    """The limit is computed from Holdfast's measured step time; the mean interval between two kills
    is the same for both sides."""
    limit = storm_limit(ours.step_s, mtbf_s)
    return StormRate(
        holdfast=ours,
        torchft=theirs,
        limit=round(limit, 3),
        of_limit=round(ours.efficiency / limit, 3),
        of_torchft=round(ours.efficiency / theirs.efficiency, 2)
        if theirs and theirs.efficiency > 0
        else None,
    )
