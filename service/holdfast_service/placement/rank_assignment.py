"""Assigns ranks to agents and worker processes. Pure and deterministic.

Promises: either every rank is assigned exactly once or none is; no agent gets more ranks than its
capacity; the ranks of one group (the ranks of one node) stay together; a group whose agent is still
present stays on it and every surviving process keeps its rank, unless that agent is to be avoided
and another has room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast_service.wording import shortened


@dataclass(frozen=True)
class IdleWorker:
    """A live process that can take a rank. With `rank`, only that rank: the process had it in the
    last attempt, or was prepared for it (`spare`)."""

    worker: str
    rank: int | None = None
    spare: bool = False
    mesh: str = ""
    """The name of the mesh of that rank (`WorldShape.mesh_name`); "": that of the last attempt."""


@dataclass(frozen=True)
class CandidateNode:
    """An agent that may get ranks."""

    agent: str
    domain: str
    """Ranks on nodes of one domain exchange fastest. "": not known."""
    capacity: int
    ready: bool
    idle: tuple[IdleWorker, ...] = ()
    avoid: bool = False
    """No new group is placed here; a group that is here stays only if no other agent has room."""
    last_resort: bool = False
    """Gets ranks only if the other agents have no room."""


@dataclass(frozen=True)
class GroupHome:
    """The agent that a group was on. `alive`: that agent, not restarted since, is a candidate."""

    agent: str
    domain: str
    alive: bool


@dataclass(frozen=True)
class PlacedRank:
    """One rank on one agent; `worker` None: a new process must be forked there."""

    rank: int
    agent: str
    worker: str | None


@dataclass(frozen=True)
class Assignment:
    """All ranks, in order. `moved`: indices of the groups that are on another agent than before."""

    placed: tuple[PlacedRank, ...]
    moved: tuple[int, ...]


@dataclass(frozen=True)
class Shortage:
    """No agent has room for these ranks."""

    ranks: tuple[int, ...]


def assign(
    groups: Sequence[Sequence[int]],
    homes: Mapping[int, GroupHome],
    nodes: Sequence[CandidateNode],
    together: int = 1,
) -> Assignment | Shortage:
    """Assign every group, or return the ranks that have no room. Each `together` consecutive groups
    exchange most, and lie in one domain where there is room.

    Agents of last resort are excluded, one after the other, as long as the others have room.
    """
    kept = list(nodes)
    found = _assign_to(groups, homes, kept, together)
    for node in nodes:
        if isinstance(found, Assignment) and node.last_resort:
            fewer = [other for other in kept if other is not node]
            without = _assign_to(groups, homes, fewer, together)
            if isinstance(without, Assignment):
                kept, found = fewer, without
    return found


def name_order(agent: str) -> tuple[int, str]:
    """Sorts "n2" before "n10"."""
    return len(agent), agent


def format_ranks(ranks: Sequence[int], max_shown: int = 8) -> str:
    """`rank 3`, `ranks 0, 1`, or `ranks 0, 1, ... (64 in all)`."""
    return f"rank{'s' if len(ranks) != 1 else ''} {shortened(ranks, max_shown)}"


def _assign_to(
    groups: Sequence[Sequence[int]],
    homes: Mapping[int, GroupHome],
    nodes: Sequence[CandidateNode],
    together: int,
) -> Assignment | Shortage:
    """An unassigned group goes to an agent without groups (a standby): first in the lost agent's
    domain, then with more warm workers; only then to an agent that has ranks and room. A
    group that had no agent goes near the one before it: neighbours in rank order exchange most, in
    tensor groups, rings and shards."""
    by_agent = {node.agent: node for node in nodes}
    free = {node.agent: node.capacity for node in nodes}
    seats: dict[int, str] = {}
    for index, group in enumerate(groups):
        home = homes.get(index)
        if home is None or not _can_stay(home, len(group), by_agent, free):
            continue
        seats[index] = home.agent
        free[home.agent] -= len(group)
    unassigned = [index for index in range(len(groups)) if index not in seats]
    short: list[int] = []
    # Larger groups first: a smaller group fits into the rest of their room, but not vice versa.
    # Groups that should move but could stay come last, and take the room that is left.
    at_home = {index for index in unassigned if index in homes and homes[index].alive}
    for index in sorted(
        unassigned, key=lambda index: (index in at_home, -len(groups[index]), index)
    ):
        home, size = homes.get(index), len(groups[index])
        if home is not None:
            near = home.domain
        else:
            near = _domain_for(index, together, seats, by_agent, _room(size, seats, by_agent, free))
        chosen = _choose(size, home, near, by_agent, free, seats)
        if chosen is None:
            short.extend(groups[index])
            continue
        seats[index] = chosen
        free[chosen] -= len(groups[index])
    if short:
        return Shortage(ranks=tuple(sorted(short)))
    moved = tuple(
        index for index in unassigned if index in homes and homes[index].agent != seats[index]
    )
    return Assignment(placed=_fill(groups, seats, by_agent), moved=moved)


def _can_stay(
    home: GroupHome, size: int, nodes: Mapping[str, CandidateNode], free: Mapping[str, int]
) -> bool:
    has_room = home.alive and free.get(home.agent, 0) >= size
    return has_room and not nodes[home.agent].avoid


def _room(
    size: int,
    seats: Mapping[int, str],
    nodes: Mapping[str, CandidateNode],
    free: Mapping[str, int],
) -> dict[str, int]:
    """Domain → its agents without groups that have room for one."""
    room: dict[str, int] = {}
    busy = set(seats.values())
    for agent in sorted(nodes, key=name_order):
        node = nodes[agent]
        if node.ready and not node.avoid and agent not in busy and free[agent] >= size:
            room[node.domain] = room.get(node.domain, 0) + 1
    return room


def _domain_for(
    index: int,
    together: int,
    seats: Mapping[int, str],
    nodes: Mapping[str, CandidateNode],
    room: Mapping[str, int],
) -> str:
    """The domain of the groups that should lie with this one, or else of the nearest group before
    it, as long as it has room for all of them; then the one with room for most groups. "" if that
    is one: then no groups can be neighbours."""
    first = index - index % together
    mates = [seats[other] for other in range(first, first + together) if other in seats]
    if mates and room.get(domain := nodes[mates[0]].domain, 0):
        return domain
    before = max((other for other in seats if other < index), default=None)
    last = nodes[seats[before]].domain if before is not None else None
    best = max(room, key=lambda domain: room[domain], default="")
    all_of_them = min(together - len(mates), room.get(best, 0))
    if last is not None and room.get(last, 0) >= max(1, all_of_them):
        return last
    return best if room.get(best, 0) > 1 else ""


def _choose(
    size: int,
    home: GroupHome | None,
    near: str,
    nodes: Mapping[str, CandidateNode],
    free: Mapping[str, int],
    seats: Mapping[int, str],
) -> str | None:
    busy = set(seats.values())

    def preference(agent: str) -> tuple[bool, bool, bool, int, tuple[int, str]]:
        node = nodes[agent]
        warm = -min(len(node.idle), size)
        return node.avoid, agent in busy, node.domain != near, warm, name_order(agent)

    def allowed(node: CandidateNode) -> bool:
        at_home = home is not None and home.alive and home.agent == node.agent
        return node.ready and (at_home or not node.avoid)

    fitting = [a for a, node in nodes.items() if allowed(node) and free[a] >= size]
    return min(fitting, key=preference, default=None)


def _fill(
    groups: Sequence[Sequence[int]], seats: Mapping[int, str], nodes: Mapping[str, CandidateNode]
) -> tuple[PlacedRank, ...]:
    placed: list[PlacedRank] = []
    for agent, node in nodes.items():
        ranks = sorted(
            rank for index, seat in seats.items() if seat == agent for rank in groups[index]
        )
        workers = _workers(ranks, node.idle)
        placed.extend(
            PlacedRank(rank=rank, agent=agent, worker=workers.get(rank)) for rank in ranks
        )
    return tuple(sorted(placed, key=lambda placed_rank: placed_rank.rank))


def _workers(ranks: Sequence[int], idle: Sequence[IdleWorker]) -> dict[int, str]:
    """Rank -> worker. Survivors keep their rank and can take no other, because torch caches a
    process's position in the mesh. A free rank gets the worker prepared for it, else any warm
    worker; the rest are forked."""
    kept: dict[int, str] = {}
    for process in sorted(idle, key=lambda process: process.spare):
        if process.rank is not None and process.rank in ranks:
            kept.setdefault(process.rank, process.worker)
    taken = set(kept.values())
    spare = [
        process.worker for process in idle if process.worker not in taken and process.rank is None
    ]
    for rank in ranks:
        if rank not in kept and spare:
            kept[rank] = spare.pop(0)
    return kept
