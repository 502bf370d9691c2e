"""Lists the state from which a mesh can continue: the steps in each tier, and missing parts. Pure.

The input is only the agents' inventories and the remote tier's manifests, so a restarted supervisor
knows as much as the previous one. `placement/restore_points.py` decides what each rank loads, by
the same rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from holdfast_service.placement.restore_points import (
    BadCopy,
    HeldCopy,
    HistoryLine,
    RemoteCheckpoint,
    RestoreSource,
    StepCopies,
    copies_by_step,
    is_mesh,
)
from holdfast_workers.state.replicas import ReplicaEquality

MAX_EXPLAINED = 3
"""Most incomplete steps that are explained."""


@dataclass(frozen=True)
class Holding:
    """One step in one tier. `missing`: the ranks without a copy, in the mesh that computed it;
    ranks of which one copy would be enough are grouped. `fits`: False, if only the mesh that
    computed it can load it."""

    source: RestoreSource
    step: int
    attempt: int
    mesh: str = ""
    missing: tuple[tuple[int, ...], ...] = ()
    fits: bool = True

    @property
    def complete(self) -> bool:
        return self.fits and not self.missing


def holdings(
    mesh: Mapping[str, int],
    copies: Iterable[HeldCopy],
    remotes: Iterable[RemoteCheckpoint],
    line: HistoryLine,
    bad: frozenset[BadCopy] = frozenset(),
    bad_uris: frozenset[str] = frozenset(),
    equality: ReplicaEquality = ReplicaEquality.NOTHING,
) -> list[Holding]:
    """All complete and incomplete steps for a world of `mesh`, newest first. Steps that are not on
    the line of history are omitted. `equality`: what replicas hold alike."""
    found = [
        holding
        for held_step in copies_by_step(copies, bad)
        if line.contains(held_step.attempt, held_step.step)
        for holding in _in_memory(held_step, mesh, equality)
    ]
    found += [
        Holding(RestoreSource.REMOTE, checkpoint.step, checkpoint.attempt)
        for checkpoint in remotes
        if checkpoint.uri not in bad_uris and line.contains(checkpoint.attempt, checkpoint.step)
    ]
    tiers = list(RestoreSource)
    return sorted(found, key=lambda held: (-held.step, -held.attempt, tiers.index(held.source)))


def newest_restorable(found: Iterable[Holding]) -> dict[RestoreSource, Holding]:
    """The newest complete step of each tier. `found`: holdings, newest first."""
    newest: dict[RestoreSource, Holding] = {}
    for holding in found:
        if holding.complete:
            newest.setdefault(holding.source, holding)
    return newest


def why_not_newer(found: Iterable[Holding], step: int) -> str:
    """Describes what the newest holdings beyond `step` lack; empty if there are none."""
    newer = [holding for holding in found if holding.step > step and not holding.complete]
    lacks = {holding.step: _describe_lack(holding) for holding in reversed(newer)}
    return "; ".join(lacks[step] for step in sorted(lacks, reverse=True)[:MAX_EXPLAINED])


def _describe_lack(holding: Holding) -> str:
    if not holding.fits:
        return (
            f"step {holding.step} is in memory as each rank's own state, which only a world of "
            f"{holding.mesh} can load"
        )
    lacking = ", ".join(" or ".join(str(rank) for rank in ranks) for ranks in holding.missing)
    return f"step {holding.step} is in memory without rank {lacking}"


def _in_memory(
    held_step: StepCopies, mesh: Mapping[str, int], equality: ReplicaEquality
) -> Iterable[Holding]:
    if is_mesh(held_step.mesh, mesh):
        lacking = [(rank,) for rank in range(prod(mesh.values())) if rank not in held_step.copies]
        yield Holding(
            RestoreSource.MEMORY, held_step.step, held_step.attempt, held_step.mesh, tuple(lacking)
        )
        if not lacking or not held_step.divisible:
            return
    shards = tuple(held_step.missing_shards(equality))
    yield Holding(
        RestoreSource.RESHARD,
        held_step.step,
        held_step.attempt,
        held_step.mesh,
        shards,
        fits=held_step.divisible,
    )
