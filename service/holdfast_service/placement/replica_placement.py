"""Chooses the partner agents that keep the memory checkpoints of every rank. Pure.

A *shard* is the state of ranks with equal payloads, each of which is a live copy of the others:
where `replica_equality` says so, those that differ only in `dp_replicate`; else a single rank. A
*machine* is a node; a copy is on a machine without
ranks of the shard, and on one agent per machine. A *group* is the set of ranks that differ on one
mesh axis only; evicting a group removes all machines with ranks of it.

Each shard gets at most `copies` partners, never on a machine of its own and never over a link to be
avoided. Of all such choices, the one with the least `Cost` is taken, compared field by field:

1. `missing`: copies short of `copies`, over all shards. Live replicas on other machines count.
2. `on_standbys`: copies on agents without ranks. Standbys keep copies only where no other agent
   can: they are few, so each would have to keep many.
3. `exposed`: pairs (group, shard) such that evicting the group loses the shard. None exposed means
   that a partner differs in two mesh coordinates, with machines in place of ranks.
4. `one_domain`: shards that are in one failure domain with all of their copies.
5. `made`: copies to be made. So equal replicas need none, except where a shard would not survive
   the eviction of its own replicas: then one copy for all of them, not one for each.
6. `crowding`: sum of the squares of the agents' loads; with one copy per shard, the minimum also
   minimises the greatest load.

No agent keeps more than `MAX_LOAD_FACTOR` times the number of copies of its own ranks for the sake
of 4: if it would have to, 4 is not compared (`Placement.crosses_domains` is false).

The choice is exact for one copy per shard at any size; for more copies, 6 is a local optimum unless
a search of `replica_spread.SEARCHED_CHOICES` finds the best. It is deterministic, and among equals
partners are mutual where that is possible, so that few sets of machines are fatal (GEMINI,
SOSP 2023, section 4: group placement).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement
from typing import NamedTuple

from holdfast_service.placement.rank_assignment import name_order
from holdfast_service.placement.replica_spread import ReplicaDemand, balance
from holdfast_workers.state.replicas import ReplicaEquality, payload_groups

MAX_LOAD_FACTOR = 2
Partners = tuple[str, ...]


@dataclass(frozen=True)
class Site:
    """An agent that can keep copies."""

    agent: str
    node_id: str
    domain: str = ""
    """Failure domain of its node; "" if unknown."""


class Cost(NamedTuple):
    """The cost of a placement, compared in this order; see the module's docstring."""

    missing: int = 0
    on_standbys: int = 0
    exposed: int = 0
    one_domain: int = 0
    made: int = 0
    crowding: int = 0


@dataclass(frozen=True)
class AxisGroup:
    """The ranks that differ on `axis` only."""

    axis: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """A state: the ranks that have it live, their machines (`home`), the machines that keep a copy,
    and those of them that already had it (bit masks of `Topology.machines`)."""

    ranks: tuple[int, ...]
    home: int
    copies: int
    kept: int


@dataclass(frozen=True)
class Placement:
    """A choice of partners. `partners`: agents by rank, possibly an empty tuple. A rank without
    partners can still be protected by live replicas."""

    partners: Mapping[int, Partners]
    cost: Cost
    shards: tuple[Shard, ...]
    topology: Topology
    wanted: int
    """The requested number of copies."""
    crosses_domains: bool = True
    """False: domains were ignored, because an agent would have had to keep too many copies."""


class Topology:
    """The fixed input: machines, groups, domains, links. Sets of machines are bit masks."""

    def __init__(
        self,
        mesh: Mapping[str, int],
        seats: Mapping[int, str],
        sites: Sequence[Site],
        avoid: frozenset[tuple[str, str]],
    ) -> None:
        self.seats = seats
        self.avoid = avoid
        hosts = set(seats.values())
        self._node_of = {site.agent: site.node_id for site in sites}
        self.machines: list[Site] = []
        self._bit: dict[str, int] = {}
        for site in sorted(
            sites, key=lambda site: (site.agent not in hosts, name_order(site.agent))
        ):
            if site.node_id not in self._bit:
                self._bit[site.node_id] = 1 << len(self.machines)
                self.machines.append(site)
        self.everywhere = (1 << len(self.machines)) - 1
        self.hosts = self.of_ranks(seats)
        self._evictions: dict[tuple[str, int], list[AxisGroup]] = {}
        for group in groups(mesh, seats):
            taken = self.of_ranks(group.ranks)
            self._evictions.setdefault((group.axis, taken), []).append(group)
        self._by_bit: dict[int, list[tuple[str, int, int]]] = {}
        for (axis, taken), evicted in self._evictions.items():
            for bit in bits(taken):
                self._by_bit.setdefault(bit, []).append((axis, taken, len(evicted)))

    def of_ranks(self, ranks: Iterable[int]) -> int:
        """The machines that these ranks are on."""
        found = 0
        for rank in ranks:
            found |= self._bit[self._node_of[self.seats[rank]]]
        return found

    def of_agents(self, agents: Iterable[str]) -> int:
        found = 0
        for agent in agents:
            found |= self._bit[self._node_of[agent]]
        return found

    def agents(self, machines: int) -> Partners:
        found = [self.machines[bit.bit_length() - 1].agent for bit in bits(machines)]
        return tuple(sorted(found, key=name_order))

    def evictions(self, machines: int) -> list[tuple[str, int, int]]:
        """(axis, machines taken, number of groups) of every eviction that takes all `machines`."""
        lowest = machines & -machines
        return [
            eviction for eviction in self._by_bit.get(lowest, ()) if not machines & ~eviction[1]
        ]

    def groups_of(self, axis: str, taken: int) -> list[AxisGroup]:
        return self._evictions[axis, taken]

    def reachable(self, ranks: Iterable[int]) -> int:
        """Machines that at least one of the ranks can push to."""
        return self._links(tuple(dict.fromkeys(self.seats[rank] for rank in ranks)))

    def domain(self, machines: int) -> int:
        """All machines of the domain that contains these machines; 0 if unknown or several."""
        named = {self.machines[bit.bit_length() - 1].domain for bit in bits(machines)}
        return self._domains.get(named.pop(), 0) if len(named) == 1 else 0

    @cached_property
    def _domains(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for index, site in enumerate(self.machines):
            if site.domain:
                found[site.domain] = found.get(site.domain, 0) | 1 << index
        return found

    def _links(self, agents: tuple[str, ...]) -> int:
        if not self.avoid:
            return self.everywhere
        found = 0
        for index, site in enumerate(self.machines):
            if any((agent, site.agent) not in self.avoid for agent in agents):
                found |= 1 << index
        return found


def place_partners(
    mesh: Mapping[str, int],
    seats: Mapping[int, str],
    sites: Sequence[Site],
    *,
    copies: int = 1,
    avoid: frozenset[tuple[str, str]] = frozenset(),
    keep: Mapping[int, Partners] | None = None,
    equality: ReplicaEquality = ReplicaEquality.NOTHING,
) -> Placement:
    """The partners of every rank of `mesh`; `seats`: rank → agent, one of `sites`.

    `avoid`: pairs (agent, partner) between which replication has failed. `keep`: partners that
    stay, because they already hold the state; the rest is optimised around them.
    """
    topology = Topology(mesh, seats, sites, avoid)
    room = MAX_LOAD_FACTOR * copies * max(Counter(seats.values()).values(), default=0)
    shards = payload_groups(mesh, equality)
    placement = _place(shards, topology, copies, keep or {}, crosses_domains=True)
    if _greatest_load(placement) > room:
        return _place(shards, topology, copies, keep or {}, crosses_domains=False)
    return placement


def coordinates(rank: int, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """The rank's coordinate on every axis, in the mesh's order (outermost first)."""
    found: list[int] = []
    for size in reversed(list(mesh.values())):
        found.append(rank % size)
        rank //= size
    return tuple(reversed(found))


def groups(mesh: Mapping[str, int], ranks: Iterable[int]) -> list[AxisGroup]:
    """Every group of two or more ranks."""
    found: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    axes = list(mesh)
    for rank in sorted(ranks):
        place = coordinates(rank, mesh)
        for index, axis in enumerate(axes):
            if mesh[axis] > 1:
                found.setdefault((axis, (*place[:index], *place[index + 1 :])), []).append(rank)
    return [AxisGroup(axis, tuple(members)) for (axis, _), members in found.items()]


def bits(mask: int) -> Iterable[int]:
    """The single bits of a mask, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest
        mask ^= lowest


def _place(
    shards: Sequence[tuple[int, ...]],
    topology: Topology,
    copies: int,
    keep: Mapping[int, Partners],
    *,
    crosses_domains: bool,
) -> Placement:
    demands: list[ReplicaDemand] = []
    found: dict[tuple[int, int, int], tuple[tuple[int, ...], ...]] = {}
    for ranks in shards:
        home, kept = topology.of_ranks(ranks), _kept(topology, ranks, keep, copies)
        reach = topology.reachable(ranks) & ~home & ~kept
        if (home, kept, reach) not in found:
            domain = topology.domain(home | kept) if crosses_domains else 0
            found[home, kept, reach] = _options(topology, home, kept, reach, copies, domain)
        options = found[home, kept, reach]
        demands.append(
            ReplicaDemand(home=(home & -home).bit_length() - 1, kept=kept, options=options)
        )
    chosen, crowding = balance(demands, len(topology.machines))
    partners: dict[int, Partners] = dict.fromkeys(sorted(topology.seats), ())
    placed: list[Shard] = []
    for ranks, demand, more in zip(shards, demands, chosen, strict=True):
        placed.append(Shard(ranks, topology.of_ranks(ranks), demand.kept | more, demand.kept))
        _share_out(topology, ranks, demand.kept | more, keep, partners)
    columns = zip(*(_cost(topology, shard, copies) for shard in placed), strict=True)
    cost = Cost(*map(sum, columns))._replace(crowding=crowding)
    return Placement(partners, cost, tuple(placed), topology, copies, crosses_domains)


def _greatest_load(placement: Placement) -> int:
    loads = Counter(agent for agents in placement.partners.values() for agent in agents)
    return max(loads.values(), default=0)


def _kept(
    topology: Topology, ranks: tuple[int, ...], keep: Mapping[int, Partners], copies: int
) -> int:
    """Machines whose copies stay: at most `copies`, and none on the shard's own machines."""
    home, found = topology.of_ranks(ranks), 0
    for agent in (agent for rank in ranks for agent in keep.get(rank, ())):
        if found.bit_count() < copies:
            found |= topology.of_agents([agent]) & ~home
    return found


def _options(
    topology: Topology,
    home: int,
    kept: int,
    reach: int,
    copies: int,
    domain: int,
) -> tuple[tuple[int, ...], ...]:
    """Every choice of machines for a shard with the least cost, not counting load.

    Machines that no eviction, domain or standby distinguishes form a class: a choice is a tuple of
    classes (masks), with one entry for each machine to be taken from that class. `domain`: the
    machines of the one domain that contains the shard, 0 if it does not matter.
    """
    dangers = topology.evictions(home | kept)
    classes = [reach] if reach else []
    for cut in (*{taken for _, taken, _ in dangers}, domain, topology.hosts):
        classes = [part for whole in classes for part in (whole & cut, whole & ~cut) if part]
    traits = sorted(_MachineClass.of(part, topology, dangers, domain) for part in classes)
    made, short = kept.bit_count(), copies - (home.bit_count() - 1)
    best: tuple[int, ...] = ()
    options: list[tuple[int, ...]] = []
    for size in range(copies - made + 1):
        for choice in combinations_with_replacement(traits, size):
            parts = tuple(machine_class.machines for machine_class in choice)
            if size > 1 and any(parts.count(part) > part.bit_count() for part in parts):
                continue
            placeholders, inside, standbys = (1 << len(dangers)) - 1, bool(domain), 0
            for machine_class in choice:
                placeholders, inside = (
                    placeholders & machine_class.placeholders,
                    inside and machine_class.in_domain,
                )
                standbys += machine_class.standby
            exposed = sum(n for index, (_, _, n) in enumerate(dangers) if placeholders >> index & 1)
            cost = (max(0, short - made - size), standbys, exposed, int(inside), size)
            if not best or cost < best:
                best, options = cost, []
            if cost == best:
                options.append(parts)
    return tuple(options)


def _cost(topology: Topology, shard: Shard, copies: int) -> Cost:
    """A shard's part of the cost of a placement, not counting load."""
    have, made = shard.home | shard.copies, shard.copies.bit_count()
    domain = topology.domain(have)
    return Cost(
        missing=max(0, copies - (shard.home.bit_count() - 1) - made),
        on_standbys=(shard.copies & ~topology.hosts).bit_count(),
        exposed=sum(number for _, _, number in topology.evictions(have)),
        one_domain=int(bool(domain)),
        made=made,
    )


class _MachineClass(NamedTuple):
    """Machines that are equivalent for one shard."""

    machines: int
    placeholders: int
    """The dangerous evictions that take these machines (bits: indices of evictions)."""
    in_domain: bool
    """Whether they are in the one domain that contains the shard."""
    standby: int

    @classmethod
    def of(
        cls, part: int, topology: Topology, dangers: Sequence[tuple[str, int, int]], domain: int
    ) -> _MachineClass:
        placeholders = 0
        for index, (_, taken, _) in enumerate(dangers):
            if not part & ~taken:
                placeholders |= 1 << index
        return cls(part, placeholders, not part & ~domain, int(not part & topology.hosts))


def _share_out(
    topology: Topology,
    ranks: tuple[int, ...],
    machines: int,
    keep: Mapping[int, Partners],
    partners: dict[int, Partners],
) -> None:
    """Choose the rank that sends each copy: the rank that already does, else the least loaded."""
    for agent in topology.agents(machines):
        sender = next((rank for rank in ranks if agent in keep.get(rank, ())), None)
        if sender is None:
            senders = [
                rank for rank in ranks if (topology.seats[rank], agent) not in topology.avoid
            ]
            sender = min(senders, key=lambda rank: (len(partners[rank]), rank))
        partners[sender] = (*partners[sender], agent)
