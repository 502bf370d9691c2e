"""What there is to go on from: for a mesh, the newest step in each tier, and what is missing. Pure.

Made of the agents' inventories and the remote tier's manifests alone, so a supervisor that has
just restarted knows as much as the one before it. What a rank takes in fact is decided in
`placement/restore_points.py`, by the same rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from holdfast_service.placement.restore_points import (
    BadCopy,
    HeldCopy,
    HistoryLine,
    RemoteCheckpoint,
    StepCopies,
    RestoreSource,
    is_mesh,
    copies_by_step,
)

MAX_EXPLAINED = 3
"""Steps that were of no use and are explained at most."""


@dataclass(frozen=True)
class Holding:
    """One step in one tier. `missing`: the ranks of `mesh`, the one that computed it, that nobody
    holds; where several would do, they stand together."""

    source: RestoreSource
    step: int
    attempt: int
    mesh: str = ""
    missing: tuple[tuple[int, ...], ...] = ()

    @property
    def complete(self) -> bool:
        return not self.missing

    def data(self) -> dict[str, Any]:
        """As a view shows it."""
        return {
            "tier": self.source.value,
            "step": self.step,
            "attempt": self.attempt,
            "mesh": self.mesh,
            "complete": self.complete,
            "missing": [list(ranks) for ranks in self.missing],
        }


def holdings(
    mesh: Mapping[str, int],
    copies: Iterable[HeldCopy],
    remotes: Iterable[RemoteCheckpoint],
    line: HistoryLine,
    bad: frozenset[BadCopy] = frozenset(),
    bad_uris: frozenset[str] = frozenset(),
) -> list[Holding]:
    """All that a world of `mesh` could start from or lacks something of, newest first. What is not
    on the line of history is left out."""
    found = [
        holding
        for shelf in copies_by_step(copies, bad)
        if line.contains(shelf.attempt, shelf.step)
        for holding in _in_memory(shelf, mesh)
    ]
    found += [
        Holding(RestoreSource.REMOTE, one.step, one.attempt)
        for one in remotes
        if one.uri not in bad_uris and line.contains(one.attempt, one.step)
    ]
    tiers = list(RestoreSource)
    return sorted(found, key=lambda one: (-one.step, -one.attempt, tiers.index(one.source)))


def newest_restorable(found: Iterable[Holding]) -> dict[RestoreSource, Holding]:
    """The newest complete step of each tier, of holdings that are newest first."""
    newest: dict[RestoreSource, Holding] = {}
    for one in found:
        if one.complete:
            newest.setdefault(one.source, one)
    return newest


def why_not_newer(found: Iterable[Holding], step: int) -> str:
    """In words, what the newest holdings beyond `step` lack; empty if there are none."""
    newer = [one for one in found if one.step > step and not one.complete]
    told = {one.step: _what_it_lacks(one) for one in reversed(newer)}
    return "; ".join(told[step] for step in sorted(told, reverse=True)[:MAX_EXPLAINED])


def _what_it_lacks(holding: Holding) -> str:
    lacking = ", ".join(" or ".join(str(rank) for rank in ranks) for ranks in holding.missing)
    return f"step {holding.step} is in memory without rank {lacking}"


def _in_memory(shelf: StepCopies, mesh: Mapping[str, int]) -> Iterable[Holding]:
    if is_mesh(shelf.mesh, mesh):
        lacking = [(rank,) for rank in range(prod(mesh.values())) if rank not in shelf.copies]
        yield Holding(RestoreSource.MEMORY, shelf.step, shelf.attempt, shelf.mesh, tuple(lacking))
        if not lacking:
            return
    shards = tuple(shelf.missing_shards())
    yield Holding(RestoreSource.RESHARD, shelf.step, shelf.attempt, shelf.mesh, shards)
