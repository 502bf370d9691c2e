"""The figures computed from measurements; pure functions without I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True)
class AppliedStep:
    """A step applied by a world. `world` grows by one with each world that is formed."""

    world: int
    step: int
    at: float


@dataclass(frozen=True)
class Recovery:
    """From a fault, an order or the return of a node to the first new step: one beyond every step
    that an older world applied, also those in flight at that time."""

    at: float
    last_step: int
    last_step_at: float
    new_step_at: float
    phases_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def recovery_s(self) -> float:
        """Return the time from the cause to the first new step, with the detection."""
        return self.new_step_at - self.at

    @property
    def pause_s(self) -> float:
        """Return the time from the last older step to the first new one, a whole step included."""
        return self.new_step_at - self.last_step_at

    def __str__(self) -> str:
        return (
            f"{self.recovery_s:.3f} s to the first step beyond step {self.last_step}, "
            f"pause {self.pause_s:.3f} s; phases {self.phases_s}"
        )


def recovery(
    steps: Sequence[AppliedStep],
    at: float,
    world: int | None = None,
    *,
    reached: int = 0,
    phases_s: Mapping[str, float] | None = None,
) -> Recovery | None:
    """The recovery that ended with `world`, or with any after that which stepped before `at`. None:
    there is no new step yet, or those of the older worlds have not arrived.

    `reached`: the last step of the older worlds, which `steps` may lack if it was computed again.
    """
    if world is None:
        world = 1 + max((step.world for step in steps if step.at <= at), default=0)
    before = [step for step in steps if step.world < world]
    last = max(reached, *(step.step for step in before), 0)
    new = [step.at for step in steps if step.world >= world and step.step > last]
    if not before or not new:
        return None
    return Recovery(at, last, max(step.at for step in before), min(new), phases_s or {})


def median_phases(phases: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median of each phase over the recoveries that have it, in the order first seen."""
    names = dict.fromkeys(name for phase in phases for name in phase)
    return {name: round(median(p[name] for p in phases if name in p), 4) for name in names}


@dataclass(frozen=True)
class SideFigures:
    """The recoveries of one side, in seconds: median, least and greatest, and each phase's
    median."""

    median_s: float
    min_max_s: list[float]
    phases_s: dict[str, float]
    faults: int


def side_figures(faults: Sequence[Recovery]) -> SideFigures:
    found = [round(fault.recovery_s, 4) for fault in faults]
    phases_s = median_phases([fault.phases_s for fault in faults])
    return SideFigures(round(median(found), 4), [min(found), max(found)], phases_s, len(found))


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
    holdfast: Sequence[Recovery], ray_train: Mapping[str, Sequence[Recovery]]
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
    """Compare the step times of the two sides.

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
