"""Compares two runs of one job, step by step. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True)
class RunComparison:
    """`equal` of `steps` steps are the same in both runs; the others are listed."""

    what: str
    steps: int
    equal: int
    differing: tuple[int, ...]
    missing: tuple[int, ...]

    @property
    def same(self) -> bool:
        return self.steps > 0 and self.equal == self.steps

    def plain(self) -> dict[str, object]:
        """The comparison as a JSON object."""
        return {"what": self.what, "steps": self.steps, "equal": self.equal}

    def __str__(self) -> str:
        text = f"{self.what}: {self.equal} of {self.steps} steps equal"
        if self.differing:
            text += f"; the first that differs is step {self.differing[0]}"
        if self.missing:
            text += f"; {len(self.missing)} steps are missing, the first is {self.missing[0]}"
        return text


def compare(
    what: str, steps: int, first: Mapping[int, Value], second: Mapping[int, Value]
) -> RunComparison:
    """Compare steps 1 to `steps`; a step that is missing in a run is not equal."""
    missing = tuple(step for step in range(1, steps + 1) if step not in first or step not in second)
    differing = tuple(
        step for step in range(1, steps + 1) if step not in missing and first[step] != second[step]
    )
    equal = steps - len(missing) - len(differing)
    return RunComparison(what, steps, equal, differing, missing)
