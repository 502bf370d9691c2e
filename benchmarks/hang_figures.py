"""Figures computed from injected hangs and from healthy steps; pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isinf
from statistics import median

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
        return (
            float("inf") if self.verdict_s is None else self.verdict_s / max(self.p999_s, floor_s)
        )


@dataclass(frozen=True)
class VerdictTimes:
    """Seconds from the onset to the verdict; None: no verdict."""

    median: float | None
    greatest: float | None


@dataclass(frozen=True)
class KindFigures:
    """The trials of one kind of hang; `verdict_s` is their median."""

    trials: int
    verdict_s: float | None
    exact_share: float | None


@dataclass(frozen=True)
class DetectionResult:
    """The last line. `verdict_vs_p999` is the maximum; None: a hang was missed."""

    verdict_vs_p999: float | None
    verdict_vs_p999_median: float | None
    suspect_share: float | None
    exact_share: float | None
    false_alarms: int
    healthy_steps: int
    trials: int
    missed: int
    verdict_s: VerdictTimes
    floor_s: float
    kinds: dict[str, KindFigures]


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
    verdicts = [trial.verdict_s for trial in trials if trial.verdict_s is not None]
    over = [trial.over(floor_s) for trial in trials]
    return DetectionResult(
        verdict_vs_p999=_finite(max(over)) if over else None,
        verdict_vs_p999_median=_finite(median(over)) if over else None,
        suspect_share=_share(trial.rank in trial.suspects for trial in trials),
        exact_share=_share(trial.accused == (trial.rank,) for trial in trials),
        false_alarms=false_alarms,
        healthy_steps=healthy_steps,
        trials=len(trials),
        missed=len(trials) - len(verdicts),
        verdict_s=VerdictTimes(
            median=round(median(verdicts), 3) if verdicts else None,
            greatest=round(max(verdicts), 3) if verdicts else None,
        ),
        floor_s=floor_s,
        kinds={kind: _of_kind(found) for kind, found in by_kind(trials).items()},
    )


def by_kind(trials: Sequence[HangTrial]) -> Mapping[str, list[HangTrial]]:
    found: dict[str, list[HangTrial]] = {}
    for trial in trials:
        found.setdefault(trial.kind, []).append(trial)
    return found


def _of_kind(trials: Sequence[HangTrial]) -> KindFigures:
    verdicts = [trial.verdict_s for trial in trials if trial.verdict_s is not None]
    return KindFigures(
        trials=len(trials),
        verdict_s=round(median(verdicts), 3) if verdicts else None,
        exact_share=_share(trial.accused == (trial.rank,) for trial in trials),
    )


def _finite(value: float) -> float | None:
    return None if isinf(value) else round(value, 3)


def _share(found: Iterable[bool]) -> float | None:
    counted = list(found)
    return round(sum(counted) / len(counted), 4) if counted else None
