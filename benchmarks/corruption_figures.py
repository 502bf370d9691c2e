"""What is computed from bits that were flipped and from steps that were healthy. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class FlipResult:
    """One flipped bit, and what was made of it."""

    mesh: str
    tensor: str
    rank: int
    step: int
    within: int | None
    """Steps from the one in which it flipped to the one in which it was found: 0 is the same
    step; None: never."""
    named: tuple[int, ...] = ()
    """The ranks that were said to have computed other bits."""


def flip_result(
    mesh: str, flip: Mapping[str, Any], incidents: Iterable[Mapping[str, Any]], apart: int
) -> FlipResult:
    """What the incidents of the run say of one flip, by the steps that they went back to; `apart`:
    steps between two flips."""
    near = range(flip["step"] - 2, flip["step"] + apart - 2)
    mine = [
        incident
        for incident in incidents
        if incident["cause"] == "corruption" and incident["restored_step"] in near
    ]
    named = {
        lost["rank"] for item in mine for lost in item["lost"] if lost["cause"] == "corruption"
    } - {None}
    first = mine[0] if mine else None
    at = None if first is None else first["restored_step"] + first["steps_lost"] + 1
    return FlipResult(
        mesh=mesh,
        tensor=flip["tensor"],
        rank=flip["rank"],
        step=flip["step"],
        within=None if at is None else max(0, at - flip["step"]),
        named=tuple(sorted(named)),
    )


def check_share(steps: Sequence[tuple[float, float]], skip: int) -> float:
    """Time of the checks over time of the steps, both in s; the first `skip` are left out. Raises
    ValueError if nothing is left."""
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
) -> dict[str, Any]:
    """The benchmark's last line. `others`: incidents that no flip explains. `overhead` is the
    median over the ranks of the time spent on checks; `step_ratio` compares whole steps."""
    within = [item.within for item in found if item.within is not None]
    return {
        "found_share": _share(entry.within is not None for entry in found),
        "within_steps": max(within, default=None),
        "named_share": _share(element.named == (element.rank,) for element in found),
        "overhead": round(median(shares), 5) if shares else None,
        "step_ratio": round(median(ratios), 4) if ratios else None,
        "step_ratio_by_round": [round(ratio, 4) for ratio in ratios],
        "false_alarms": false_alarms + others,
        "healthy_steps": healthy_steps,
        "flips": len(found),
    }


def _share(held: Iterable[bool]) -> float | None:
    seen = list(held)
    return round(sum(seen) / len(seen), 4) if seen else None
