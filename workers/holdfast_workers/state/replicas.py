"""Replicas of one state, and what is wrong when their bits differ. Pure.

Ranks that differ in `dp_replicate` alone hold the same payload byte for byte, so the digests that
ride in the agreement must be equal among them. And nobody changes a parameter between two steps:
a rank that finds its own changed says so in the same agreement, before a gradient that was made of
it is applied anywhere. So what is wrong never spreads from the rank where it began, and every
rank finds it at the same step.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from holdfast_workers.errors import WorkersError

REPLICATED_AXIS = "dp_replicate"
"""Ranks that differ in this axis alone hold the same parameters and moments."""


def shards(mesh: Mapping[str, int]) -> list[tuple[int, ...]]:
    """The ranks of `mesh`, those that hold the same boxes of every tensor together."""
    alike: dict[tuple[int, ...], list[int]] = {}
    axes = list(mesh)
    for rank, place in enumerate(itertools.product(*(range(mesh[axis]) for axis in axes))):
        key = tuple(at for axis, at in zip(axes, place, strict=True) if axis != REPLICATED_AXIS)
        alike.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in alike.values()]


@dataclass(frozen=True)
class Finding:
    """What all ranks of an attempt found in one agreement."""

    attempt: int
    step: int
    """The state that was compared, and that every rank stood on."""
    bad_from: int
    """No state of this step or a later one, as computed so far, is to be used."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Ranks that should hold the same state, and do not."""
    digests: Mapping[int, str] = field(default_factory=dict)
    """Of those ranks."""
    changed: tuple[int, ...] = ()
    """Ranks whose own parameters changed while nobody was to change them."""

    def data(self) -> dict[str, Any]:
        """JSON throughout."""
        return {**asdict(self), "digests": {str(rank): one for rank, one in self.digests.items()}}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Finding:
        return cls(
            attempt=data["attempt"],
            step=data["step"],
            bad_from=data["bad_from"],
            groups=tuple(tuple(group) for group in data["groups"]),
            digests={int(rank): one for rank, one in data["digests"].items()},
            changed=tuple(data["changed"]),
        )


class CorruptionFound(WorkersError):
    """Some rank's state is not what it should be; the step was applied by nobody."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(in_words(finding))
        self.finding = finding


@dataclass(frozen=True)
class Comparison:
    """Which ranks of a world are compared, and when: after each multiple of each of `every`."""

    groups: tuple[tuple[int, ...], ...] = ()
    every: tuple[int, ...] = ()

    @classmethod
    def of(cls, mesh: Mapping[str, int], every_steps: int, digest_every_steps: int) -> Comparison:
        """The states that have a digest anyway are compared too; with `every_steps` 0 none is."""
        groups = tuple(ranks for ranks in shards(mesh) if len(ranks) > 1) if every_steps else ()
        return cls(groups, (every_steps, digest_every_steps or every_steps) if groups else ())

    def is_due(self, step: int, *, last: bool) -> bool:
        """Whether the state after `step` is to be compared."""
        return bool(self.groups) and (last or any(step % every == 0 for every in self.every))

    def check(
        self, attempt: int, step: int, digests: Sequence[str], changed: Sequence[bool]
    ) -> None:
        """Raise CorruptionFound if replicas of the state at `step` differ, or a rank's parameters
        have changed since. By rank: `digests` (empty: nothing to compare), and `changed`."""
        differing = tuple(
            ranks for ranks in self.groups if digests and len({digests[rank] for rank in ranks}) > 1
        )
        odd = tuple(rank for rank, has in enumerate(changed) if has)
        if not differing and not odd:
            return
        since = self._compared_before(step) + 1 if differing else step + 1
        digests_of = {rank: digests[rank] for ranks in differing for rank in ranks}
        raise CorruptionFound(Finding(attempt, step, since, differing, digests_of, odd))

    def _compared_before(self, step: int) -> int:
        """The newest step before `step` that was compared, and so was good."""
        return max((step - 1) // every * every for every in self.every)


def in_words(finding: Finding) -> str:
    """What was found, for people."""
    said = []
    if finding.groups:
        groups = "; ".join(
            ", ".join(f"rank {rank} {finding.digests[rank][:8]}" for rank in ranks)
            for ranks in finding.groups
        )
        said.append(f"replicas of the state after step {finding.step} differ: {groups}")
    if finding.changed:
        ranks = ", ".join(str(rank) for rank in finding.changed)
        said.append(f"parameters of rank {ranks} changed by themselves after step {finding.step}")
    return "; ".join(said)
