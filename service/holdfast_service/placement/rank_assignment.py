"""Which worker on which agent takes which rank: a pure, deterministic assignment.

Promises: every rank is seated exactly once or nothing is; no agent gets more ranks than its
capacity; the ranks of one group (a node's worth) sit together; a group whose agent is still there
stays with it and every surviving process keeps its rank, unless that agent is to be avoided and
there is room elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Idle:
    """A living process that can take a rank: this one alone, if it had one in the last attempt or
    has built ahead for one (`spare`)."""

    worker: str
    rank: int | None = None
    spare: bool = False


@dataclass(frozen=True)
class Node:
    """An agent that may be given ranks."""

    agent: str
    domain: str
    capacity: int
    ready: bool
    idle: tuple[Idle, ...] = ()
    avoid: bool = False
    """No group comes to sit here; one that is at home here stays if there is no other place."""
    last_resort: bool = False
    """Not to be given ranks as long as there is other room."""


@dataclass(frozen=True)
class Home:
    """Where a group sat. `alive`: the very same life of that agent is among the nodes."""

    agent: str
    domain: str
    alive: bool


@dataclass(frozen=True)
class Placed:
    """One rank on one agent; `worker` None means a process to be forked there."""

    rank: int
    agent: str
    worker: str | None


@dataclass(frozen=True)
class Assignment:
    """All ranks, in order. `moved`: groups (by number) that sit on another agent than before."""

    placed: tuple[Placed, ...]
    moved: tuple[int, ...]


@dataclass(frozen=True)
class Shortage:
    """There is no room for these ranks."""

    ranks: tuple[int, ...]


def assign(
    groups: Sequence[Sequence[int]], homes: Mapping[int, Home], nodes: Sequence[Node]
) -> Assignment | Shortage:
    """Seat every group, or say which ranks find no room.

    Agents of last resort do without, one after the other, as long as the others have room.
    """
    kept = list(nodes)
    found = _assign(groups, homes, kept)
    for node in nodes:
        if isinstance(found, Assignment) and node.last_resort:
            fewer = [one for one in kept if one is not node]
            without = _assign(groups, homes, fewer)
            if isinstance(without, Assignment):
                kept, found = fewer, without
    return found


def name_order(agent: str) -> tuple[int, str]:
    """Sorts "n2" before "n10"."""
    return len(agent), agent


def listed(ranks: Sequence[int], most: int = 8) -> str:
    """`rank 3`, `ranks 0, 1`, or `ranks 0, 1, ... (64 in all)`."""
    shown = ", ".join(str(rank) for rank in ranks[:most])
    if len(ranks) > most:
        return f"ranks {shown}, ... ({len(ranks)} in all)"
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}"


def _assign(
    groups: Sequence[Sequence[int]], homes: Mapping[int, Home], nodes: Sequence[Node]
) -> Assignment | Shortage:
    """A hole goes to an agent that holds no group (a standby), in the lost agent's failure domain
    first, then the one with more warm workers; only then to one with room beside its own ranks.
    """
    by_agent = {node.agent: node for node in nodes}
    free = {node.agent: node.capacity for node in nodes}
    seats: dict[int, str] = {}
    for index, group in enumerate(groups):
        home = homes.get(index)
        if home is None or not _may_stay(home, len(group), by_agent, free):
            continue
        seats[index] = home.agent
        free[home.agent] -= len(group)
    holes = [index for index in range(len(groups)) if index not in seats]
    short: list[int] = []
    # Larger groups first: a smaller one always fits where they left room, not the other way. Those
    # that are only to be moved, and could stay, take what room the others have left.
    at_home = {hole for hole in holes if hole in homes and homes[hole].alive}
    for index in sorted(holes, key=lambda hole: (hole in at_home, -len(groups[hole]), hole)):
        chosen = _choose(len(groups[index]), homes.get(index), by_agent, free, seats)
        if chosen is None:
            short.extend(groups[index])
            continue
        seats[index] = chosen
        free[chosen] -= len(groups[index])
    if short:
        return Shortage(ranks=tuple(sorted(short)))
    moved = tuple(index for index in holes if index in homes and homes[index].agent != seats[index])
    return Assignment(placed=_fill(groups, seats, by_agent), moved=moved)


def _may_stay(home: Home, size: int, nodes: Mapping[str, Node], free: Mapping[str, int]) -> bool:
    there = home.alive and free.get(home.agent, 0) >= size
    return there and not nodes[home.agent].avoid


def _choose(
    size: int,
    home: Home | None,
    nodes: Mapping[str, Node],
    free: Mapping[str, int],
    seats: Mapping[int, str],
) -> str | None:
    busy = set(seats.values())

    def preference(agent: str) -> tuple[bool, bool, bool, int, tuple[int, str]]:
        node = nodes[agent]
        strange = home is not None and node.domain != home.domain
        warm = -min(len(node.idle), size)
        return node.avoid, agent in busy, strange, warm, name_order(agent)

    def allowed(node: Node) -> bool:
        at_home = home is not None and home.alive and home.agent == node.agent
        return node.ready and (at_home or not node.avoid)

    fitting = [a for a, node in nodes.items() if allowed(node) and free[a] >= size]
    return min(fitting, key=preference, default=None)


def _fill(
    groups: Sequence[Sequence[int]], seats: Mapping[int, str], nodes: Mapping[str, Node]
) -> tuple[Placed, ...]:
    placed: list[Placed] = []
    for agent, node in nodes.items():
        ranks = sorted(rank for index, at in seats.items() if at == agent for rank in groups[index])
        workers = _workers(ranks, node.idle)
        placed.extend(Placed(rank=rank, agent=agent, worker=workers.get(rank)) for rank in ranks)
    return tuple(sorted(placed, key=lambda one: one.rank))


def _workers(ranks: Sequence[int], idle: Sequence[Idle]) -> dict[int, str]:
    """Survivors keep their rank, and are good for no other: torch remembers where on the mesh a
    process stood. Who has built for a hole fills it, else any warm worker, before one is forked."""
    kept: dict[int, str] = {}
    for one in sorted(idle, key=lambda one: one.spare):
        if one.rank is not None and one.rank in ranks:
            kept.setdefault(one.rank, one.worker)
    taken = set(kept.values())
    spare = [one.worker for one in idle if one.worker not in taken and one.rank is None]
    for rank in ranks:
        if rank not in kept and spare:
            kept[rank] = spare.pop(0)
    return kept
