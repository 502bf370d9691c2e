"""Figures computed from flipped bits and from healthy steps; pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class FlipResult:
    """One flipped bit and its detection."""

    mesh: str
    tensor: str
    rank: int
    step: int
    within: int | None
    """Steps from the flip to its detection: 0 is the same step; None: never detected."""
    named: tuple[int, ...] = ()
    """The ranks accused of having computed other bits."""


@dataclass(frozen=True)
class CorruptionResult:
    """The last line. `overhead` is the median over the ranks of the time spent on checks;
    `step_ratio` compares whole steps. None: not measured."""

    found_share: float | None
    within_steps: int | None
    named_share: float | None
    overhead: float | None
    step_ratio: float | None
    step_ratio_by_round: list[float]
    false_alarms: int
    healthy_steps: int
    flips: int


def flip_result(
    mesh: str, flip: Mapping[str, Any], incidents: Iterable[Mapping[str, Any]], apart: int
) -> FlipResult:
    """Match the incidents of a run to one flip by their restored steps; `apart` is the number of
    steps between two flips."""
    near = range(flip["step"] - 2, flip["step"] + apart - 2)
    mine = [
        incident
        for incident in incidents
        if incident["cause"] == "corruption" and incident["restored_step"] in near
    ]
    named = {
        lost["rank"]
        for incident in mine
        for lost in incident["lost"]
        if lost["cause"] == "corruption"
    } - {None}
    first = mine[0] if mine else None
    found_at = None if first is None else first["restored_step"] + first["steps_lost"] + 1
    return FlipResult(
        mesh=mesh,
        tensor=flip["tensor"],
        rank=flip["rank"],
        step=flip["step"],
        within=None if found_at is None else max(0, found_at - flip["step"]),
        named=tuple(sorted(named)),
    )


def check_share(steps: Sequence[tuple[float, float]], skip: int) -> float:
    """Time of the checks over the rest of the step time; the first `skip` steps are left out.

    Raises ValueError if no steps remain."""
    kept = steps[skip:]
    if not kept:
        raise ValueError("no step was measured")
    return sum(spent for _, spent in kept) / sum(took - spent for took, spent in kept)


def corruption_summary(
    found: Sequence[FlipResult],
    others: int,
    healthy_steps: int,
    false_alarms: int,
    shares: Sequence[float],
    ratios: Sequence[float],
) -> CorruptionResult:
    """`others`: incidents not caused by a flip."""
    within = [flip.within for flip in found if flip.within is not None]
    return CorruptionResult(
        found_share=_share(flip.within is not None for flip in found),
        within_steps=max(within, default=None),
        named_share=_share(flip.named == (flip.rank,) for flip in found),
        overhead=round(median(shares), 5) if shares else None,
        step_ratio=round(median(ratios), 4) if ratios else None,
        step_ratio_by_round=[round(ratio, 4) for ratio in ratios],
        false_alarms=false_alarms + others,
        healthy_steps=healthy_steps,
        flips=len(found),
    )


def _share(outcomes: Iterable[bool]) -> float | None:
    seen = list(outcomes)
    return round(sum(seen) / len(seen), 4) if seen else None
