"""What replicas hold alike, and the comparison that reports silent corruption. Pure.

Replicas are ranks that differ only in `dp_replicate`. `replica_equality` says what they have in
common; where memory checkpoints are placed and restored, and what is compared, follows from it and
from nothing else.

Digests of what replicas share, in their agreement records, must be equal. And no code changes a
parameter between two steps: a rank whose own parameters changed reports it in the same agreement,
before any rank applies a gradient computed from them. So a corruption never spreads from the rank
where it began, and every rank detects it at the same step.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from holdfast_workers.errors import WorkersError
from holdfast_workers.protocol.findings import ReplicaFinding
from holdfast_workers.spec import BUILT_IN_RECIPES, TrainingSpec

REPLICATED_AXIS = "dp_replicate"
"""Ranks that differ only in this axis hold the same parameters and moments."""


class ReplicaEquality(StrEnum):
    """The part of the state that replicas hold alike, byte for byte."""

    NOTHING = "nothing"
    """Replicas share nothing: each rank's payload is its own."""
    SHARED = "shared"
    """All entries but those that are local to a rank (`TensorEntry.is_local`)."""
    PAYLOAD = "payload"
    """The whole payload: a copy of one replica's is a copy of all."""


def replica_equality(spec: TrainingSpec) -> ReplicaEquality:
    """What the replicas of a job hold alike.

    A program saves what it likes. In the state of a user's function or recipe, buffers, objects and
    a rank's own bytes may differ. Only the built-in recipes are known to have nothing of the kind.
    """
    if spec.brings_program:
        return ReplicaEquality.NOTHING
    if spec.function_name is None and spec.recipe in BUILT_IN_RECIPES:
        return ReplicaEquality.PAYLOAD
    return ReplicaEquality.SHARED


def payload_groups(mesh: Mapping[str, int], equality: ReplicaEquality) -> list[tuple[int, ...]]:
    """The ranks of `mesh`, grouped by equal payloads: one copy is enough for a group."""
    if equality is ReplicaEquality.PAYLOAD:
        return ranks_by_shard(mesh)
    return [(rank,) for rank in range(prod(mesh.values()))]


def ranks_by_shard(mesh: Mapping[str, int]) -> list[tuple[int, ...]]:
    """The ranks of `mesh`, grouped by the boxes that they hold of every tensor."""
    groups: dict[tuple[int, ...], list[int]] = {}
    axes = list(mesh)
    for rank, coordinates in enumerate(itertools.product(*(range(mesh[axis]) for axis in axes))):
        key = tuple(
            index for axis, index in zip(axes, coordinates, strict=True) if axis != REPLICATED_AXIS
        )
        groups.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


class CorruptionFound(WorkersError):
    """The state of some rank is corrupt; no rank has applied the step."""

    def __init__(self, finding: ReplicaFinding) -> None:
        super().__init__(describe(finding))
        self.finding = finding


@dataclass(frozen=True)
class ReplicaComparison:
    """Compares `groups` of ranks after each multiple of each number in `every`."""

    groups: tuple[tuple[int, ...], ...] = ()
    every: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        mesh: Mapping[str, int],
        every_steps: int,
        digest_every_steps: int,
        *,
        repeatable: bool = True,
        equality: ReplicaEquality = ReplicaEquality.SHARED,
    ) -> ReplicaComparison:
        """The comparison for `mesh`. States that have a digest anyway are compared too;
        `every_steps` 0 disables all comparisons of digests, and so does a computation that is not
        `repeatable`: then equal input need not give equal bits."""
        compares = every_steps and repeatable and equality is not ReplicaEquality.NOTHING
        groups = (
            tuple(ranks for ranks in ranks_by_shard(mesh) if len(ranks) > 1) if compares else ()
        )
        return cls(groups, (every_steps, digest_every_steps or every_steps) if groups else ())

    def is_due(self, step: int, *, last: bool) -> bool:
        """Whether to compare the state after `step`."""
        return bool(self.groups) and (last or any(step % every == 0 for every in self.every))

    def check(
        self, attempt: int, step: int, digests: Sequence[str], changed: Sequence[bool]
    ) -> None:
        """Raise CorruptionFound if replicas of the state at `step` differ or a rank's parameters
        have changed since. Both arguments are by rank; `digests` are of what replicas share, and
        empty if there is nothing to compare."""
        differing = tuple(
            ranks for ranks in self.groups if digests and len({digests[rank] for rank in ranks}) > 1
        )
        changed_ranks = tuple(rank for rank, has_changed in enumerate(changed) if has_changed)
        if not differing and not changed_ranks:
            return
        bad_from = self._compared_before(step) + 1 if differing else step + 1
        digests_of = {rank: digests[rank] for ranks in differing for rank in ranks}
        raise CorruptionFound(
            ReplicaFinding(attempt, step, bad_from, differing, digests_of, changed_ranks)
        )

    def _compared_before(self, step: int) -> int:
        """The newest step before `step` that was compared and therefore good."""
        return max((step - 1) // every * every for every in self.every)


def describe(finding: ReplicaFinding) -> str:
    """The message of a finding."""
    parts = []
    if finding.groups:
        groups = "; ".join(
            ", ".join(f"rank {rank} {finding.digests[rank][:8]}" for rank in ranks)
            for ranks in finding.groups
        )
        parts.append(f"replicas of the state after step {finding.step} differ: {groups}")
    if finding.changed:
        ranks = ", ".join(str(rank) for rank in finding.changed)
        parts.append(f"parameters of rank {ranks} changed by themselves after step {finding.step}")
    return "; ".join(parts)
