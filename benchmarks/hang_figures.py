"""Figures computed from injected hangs and from healthy steps; pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf, isinf
from statistics import fmean, median

QUANTILE = 0.999


@dataclass(frozen=True)
class HangTrial:
    """One hang and its verdict. `verdict_s` is None if no rank was accused in time."""

    kind: str
    mesh: str
    rank: int
    phase: str
    p999_s: float
    """99.9th percentile of the previous durations of the phase, over all ranks."""
    verdict_s: float | None
    """From the onset to the verdict."""
    suspects: tuple[int, ...] = ()
    accused: tuple[int, ...] = ()

    def over(self, floor_s: float) -> float:
        """The verdict's time over the phase's 99.9th percentile, or over the floor, which is the
        lowest limit."""
        return inf if self.verdict_s is None else self.verdict_s / max(self.p999_s, floor_s)


@dataclass(frozen=True)
class HangFigures:
    """The figures of some trials. `over`: the verdicts' times, over the phase's 99.9th percentile
    or the floor. None: infinite, because a hang without a verdict is the worst."""

    trials: int
    missed: int
    verdict_s: float | None
    greatest_s: float | None
    over: float | None
    greatest_over: float | None
    suspect_share: float
    exact_share: float


@dataclass(frozen=True)
class DetectionResult:
    """The last line: all trials, and those of each kind of hang."""

    hangs: HangFigures | None
    kinds: dict[str, HangFigures]
    floor_s: float
    false_alarms: int
    healthy_steps: int


def high(values: Iterable[float]) -> float:
    """The 99.9th percentile; the maximum of fewer than a thousand values.

    Raises ValueError if there are none."""
    found = sorted(values)
    if not found:
        raise ValueError("nothing was measured")
    return found[ceil(QUANTILE * len(found)) - 1]


def detection_summary(
    trials: Sequence[HangTrial], floor_s: float, false_alarms: int, healthy_steps: int
) -> DetectionResult:
    kinds = {kind: [each for each in trials if each.kind == kind] for kind in _kinds(trials)}
    return DetectionResult(
        hangs=_figures(trials, floor_s) if trials else None,
        kinds={kind: _figures(found, floor_s) for kind, found in kinds.items()},
        floor_s=floor_s,
        false_alarms=false_alarms,
        healthy_steps=healthy_steps,
    )


def _kinds(trials: Sequence[HangTrial]) -> list[str]:
    return list(dict.fromkeys(trial.kind for trial in trials))


def _figures(trials: Sequence[HangTrial], floor_s: float) -> HangFigures:
    verdicts = [inf if trial.verdict_s is None else trial.verdict_s for trial in trials]
    over = [trial.over(floor_s) for trial in trials]
    return HangFigures(
        trials=len(trials),
        missed=sum(isinf(verdict) for verdict in verdicts),
        verdict_s=_finite(median(verdicts)),
        greatest_s=_finite(max(verdicts)),
        over=_finite(median(over)),
        greatest_over=_finite(max(over)),
        suspect_share=round(fmean(trial.rank in trial.suspects for trial in trials), 4),
        exact_share=round(fmean(trial.accused == (trial.rank,) for trial in trials), 4),
    )


def _finite(value: float) -> float | None:
    return None if isinf(value) else round(value, 3)
