"""Where the ranks of a world stand, and which have ended: the text of a hang's reason. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast_service.placement.rank_assignment import format_ranks
from holdfast_workers.protocol.messages import Inspection

MAX_PLACES = 4
MAX_CHARACTERS = 200
COLLECTIVES = "torch/distributed/"
"""Part of the path of a frame that waits for other ranks."""


def describe_ended(ended: Mapping[int, int]) -> str:
    """The ranks whose programs have ended with exit code 0, and at which steps (0: not known)."""
    by_step: dict[int, list[int]] = {}
    for rank, step in sorted(ended.items()):
        by_step.setdefault(step, []).append(rank)
    return ", ".join(
        f"{format_ranks(ranks)} {described_end(step)}" for step, ranks in by_step.items()
    )


def described_end(step: int) -> str:
    """The end of one of them."""
    return "ended with exit code 0" + (f" at step {step}" if step else "")


def where_ranks_stand(seen: Mapping[int, Inspection]) -> str:
    """The ranks by the collectives, or functions, that they are in."""
    by_place: dict[tuple[bool, str], list[int]] = {}
    for rank, inspection in sorted(seen.items()):
        by_place.setdefault(place_of(inspection), []).append(rank)
    shown = []
    for (waits, place), ranks in by_place.items():
        one, several = ("waits", "wait") if waits else ("is", "are")
        shown.append(f"{format_ranks(ranks)} {one if len(ranks) == 1 else several} {place}")
    more = [f"{len(shown) - MAX_PLACES} more places"] if len(shown) > MAX_PLACES else []
    return ", ".join([*shown[:MAX_PLACES], *more])


def place_of(inspection: Inspection) -> tuple[bool, str]:
    """(whether the rank waits in a collective, the collective or the innermost function)"""
    inside = [group for group in inspection.beat.groups if group.entered > group.left]
    if inside:
        return True, f"in {inside[-1].kind} {inside[-1].entered} of {inside[-1].group}"
    frames = [frame for frame in inspection.stack if not frame.endswith("(kernel)")]
    if not frames:
        return False, f"in {inspection.beat.phase}"
    return COLLECTIVES in frames[0], f"at {frames[0][:MAX_CHARACTERS]}"


def all_wait_for_others(seen: Mapping[int, Inspection]) -> bool:
    """Whether every rank is in a call of `torch.distributed`, as its stack shows."""
    stacks = [inspection.stack for inspection in seen.values()]
    return all(any(COLLECTIVES in frame for frame in stack) for stack in stacks)
