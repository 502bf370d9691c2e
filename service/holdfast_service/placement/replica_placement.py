"""Who keeps whose memory checkpoint: the partner agents of every rank, chosen purely.

A *shard* is the state of the ranks that differ only in `dp_replicate`: they hold the same bytes, so
each of them is a live copy of the others. A *machine* is a node; a copy is one off the machines of
the shard's own ranks, and of several agents on a machine one is enough. A *group* is the ranks
that differ on one mesh axis only; evicting it takes all machines that any of them is on.

Of all ways to give each shard at most `copies` partners, none on a machine of its own, none over
a link to be avoided, the one taken has the least `Cost`, compared field by field:

1. `missing`: copies short of `copies`, over all shards. Live replicas on other machines count.
2. `on_standbys`: copies on agents without ranks. These keep copies only where nobody else can:
   they are few, so they would have to keep many.
3. `exposed`: pairs (group, shard) such that evicting the group loses the shard. None exposed means
   that a partner differs in two mesh coordinates, judged by machine.
4. `one_domain`: shards that lie in one failure domain with all of their copies.
5. `made`: copies to be made. So `dp_replicate` costs none, but where a shard would not survive
   the eviction of its own replicas: then one for all of them, not one for each.
6. `crowding`: sum of the squares of the agents' loads; with one copy per shard, what makes it least
   makes the greatest load least too.

For the sake of 4 no agent keeps more than `ROOM` times what is made of its own ranks: where it
would have to, 4 is left out of the comparison (`Placement.crosses_domains` is false).

The choice is exact for one copy per shard at any size; for more of them 6 is a local optimum where
a search over `balance.SEARCHED_CHOICES` does not settle it. It is deterministic, and among equals
partners are mutual where that comes by itself, so that few sets of machines are fatal (GEMINI,
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
from holdfast_service.placement.replica_spread import Demand, balance
from holdfast_workers.state.replicas import shards

ROOM = 2
Partners = tuple[str, ...]


@dataclass(frozen=True)
class Site:
    """An agent as a place for copies."""

    agent: str
    node_id: str
    domain: str = ""
    """Failure domain of its node; "" where none is known."""


class Cost(NamedTuple):
    """See the module's promise; compared in this order."""

    missing: int = 0
    on_standbys: int = 0
    exposed: int = 0
    one_domain: int = 0
    made: int = 0
    crowding: int = 0


@dataclass(frozen=True)
class Group:
    """The ranks that differ on `axis` only."""

    axis: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """A state: the ranks that have it live, their machines, those that are to keep a copy, and
    those of them that did before (bit masks of `Ground.machines`)."""

    ranks: tuple[int, ...]
    home: int
    copies: int
    kept: int


@dataclass(frozen=True)
class Placement:
    """`partners`: agents by rank, an empty tuple where there are none. A rank without one may be
    protected all the same, by live replicas."""

    partners: Mapping[int, Partners]
    cost: Cost
    shards: tuple[Shard, ...]
    ground: Ground
    wanted: int
    """The copies asked for."""
    crosses_domains: bool = True
    """False: domains were not looked at, lest some agent had to keep too many copies."""


class Ground:
    """What is fixed: machines, groups, domains, links; sets of machines are bit masks."""

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
        for site in sorted(sites, key=lambda one: (one.agent not in hosts, name_order(one.agent))):
            if site.node_id not in self._bit:
                self._bit[site.node_id] = 1 << len(self.machines)
                self.machines.append(site)
        self.everywhere = (1 << len(self.machines)) - 1
        self.hosts = self.of_ranks(seats)
        self._evictions: dict[tuple[str, int], list[Group]] = {}
        for group in groups(mesh, seats):
            taken = self.of_ranks(group.ranks)
            self._evictions.setdefault((group.axis, taken), []).append(group)
        self._by_bit: dict[int, list[tuple[str, int, int]]] = {}
        for (axis, taken), those in self._evictions.items():
            for bit in bits(taken):
                self._by_bit.setdefault(bit, []).append((axis, taken, len(those)))

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
        """(axis, machines taken, how many groups) of every eviction that takes all `machines`."""
        lowest = machines & -machines
        return [one for one in self._by_bit.get(lowest, ()) if not machines & ~one[1]]

    def groups_of(self, axis: str, taken: int) -> list[Group]:
        return self._evictions[axis, taken]

    def reachable(self, ranks: Iterable[int]) -> int:
        """Machines that at least one of the ranks can push to."""
        return self._links(tuple(dict.fromkeys(self.seats[rank] for rank in ranks)))

    def domain(self, machines: int) -> int:
        """All machines of the one domain that these lie in; 0 if it is unknown or not one."""
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
) -> Placement:
    """The partners of every rank of `mesh`; `seats`: rank → agent, one of `sites`.

    `avoid` holds pairs (agent, partner) between which replication was seen to fail. `keep`:
    partners that stay, because they hold the state already; the best is made around them.
    """
    ground = Ground(mesh, seats, sites, avoid)
    room = ROOM * copies * max(Counter(seats.values()).values(), default=0)
    placement = _place(mesh, ground, copies, keep or {}, crosses_domains=True)
    if _greatest_load(placement) > room:
        return _place(mesh, ground, copies, keep or {}, crosses_domains=False)
    return placement


def coordinates(rank: int, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """The rank's place on every axis, in the mesh's order (outermost first)."""
    found: list[int] = []
    for size in reversed(list(mesh.values())):
        found.append(rank % size)
        rank //= size
    return tuple(reversed(found))


def groups(mesh: Mapping[str, int], ranks: Iterable[int]) -> list[Group]:
    """Every group of two or more ranks."""
    found: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    axes = list(mesh)
    for rank in sorted(ranks):
        here = coordinates(rank, mesh)
        for index, axis in enumerate(axes):
            if mesh[axis] > 1:
                found.setdefault((axis, (*here[:index], *here[index + 1 :])), []).append(rank)
    return [Group(axis, tuple(members)) for (axis, _), members in found.items()]


def bits(mask: int) -> Iterable[int]:
    """The single bits of a mask, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest
        mask ^= lowest


def _place(
    mesh: Mapping[str, int],
    ground: Ground,
    copies: int,
    keep: Mapping[int, Partners],
    *,
    crosses_domains: bool,
) -> Placement:
    demands: list[Demand] = []
    found: dict[tuple[int, int, int], tuple[tuple[int, ...], ...]] = {}
    classes = shards(mesh)
    for ranks in classes:
        home, kept = ground.of_ranks(ranks), _kept(ground, ranks, keep, copies)
        reach = ground.reachable(ranks) & ~home & ~kept
        if (home, kept, reach) not in found:
            domain = ground.domain(home | kept) if crosses_domains else 0
            found[home, kept, reach] = _options(ground, home, kept, reach, copies, domain)
        options = found[home, kept, reach]
        demands.append(Demand(home=(home & -home).bit_length() - 1, kept=kept, options=options))
    chosen, crowding = balance(demands, len(ground.machines))
    partners: dict[int, Partners] = dict.fromkeys(sorted(ground.seats), ())
    placed: list[Shard] = []
    for ranks, demand, more in zip(classes, demands, chosen, strict=True):
        placed.append(Shard(ranks, ground.of_ranks(ranks), demand.kept | more, demand.kept))
        _share_out(ground, ranks, demand.kept | more, keep, partners)
    columns = zip(*(_cost(ground, shard, copies) for shard in placed), strict=True)
    cost = Cost(*map(sum, columns))._replace(crowding=crowding)
    return Placement(partners, cost, tuple(placed), ground, copies, crosses_domains)


def _greatest_load(placement: Placement) -> int:
    loads = Counter(agent for those in placement.partners.values() for agent in those)
    return max(loads.values(), default=0)


def _kept(ground: Ground, ranks: tuple[int, ...], keep: Mapping[int, Partners], copies: int) -> int:
    """Machines whose copies stay: no more than are wanted, none beside the state itself."""
    home, found = ground.of_ranks(ranks), 0
    for agent in (agent for rank in ranks for agent in keep.get(rank, ())):
        if found.bit_count() < copies:
            found |= ground.of_agents([agent]) & ~home
    return found


def _options(
    ground: Ground,
    home: int,
    kept: int,
    reach: int,
    copies: int,
    domain: int,
) -> tuple[tuple[int, ...], ...]:
    """Every choice of machines for a shard that has the least cost, load apart.

    Machines that no eviction, domain or standby tells apart are alike: a choice is a tuple of
    such classes (masks), one entry for each machine to be taken from it. `domain`: the machines
    of the one domain that it lies in, 0 if that does not matter.
    """
    dangers = ground.evictions(home | kept)
    classes = [reach] if reach else []
    for cut in (*{taken for _, taken, _ in dangers}, domain, ground.hosts):
        classes = [part for one in classes for part in (one & cut, one & ~cut) if part]
    traits = sorted(_Class.of(part, ground, dangers, domain) for part in classes)
    made, short = kept.bit_count(), copies - (home.bit_count() - 1)
    best: tuple[int, ...] = ()
    options: list[tuple[int, ...]] = []
    for size in range(copies - made + 1):
        for choice in combinations_with_replacement(traits, size):
            parts = tuple(one.machines for one in choice)
            if size > 1 and any(parts.count(part) > part.bit_count() for part in parts):
                continue
            takers, inside, standbys = (1 << len(dangers)) - 1, bool(domain), 0
            for one in choice:
                takers, inside = takers & one.takers, inside and one.in_domain
                standbys += one.standby
            exposed = sum(n for index, (_, _, n) in enumerate(dangers) if takers >> index & 1)
            cost = (max(0, short - made - size), standbys, exposed, int(inside), size)
            if not best or cost < best:
                best, options = cost, []
            if cost == best:
                options.append(parts)
    return tuple(options)


def _cost(ground: Ground, shard: Shard, copies: int) -> Cost:
    """What a shard adds to the cost of a placement, load apart."""
    have, made = shard.home | shard.copies, shard.copies.bit_count()
    domain = ground.domain(have)
    return Cost(
        missing=max(0, copies - (shard.home.bit_count() - 1) - made),
        on_standbys=(shard.copies & ~ground.hosts).bit_count(),
        exposed=sum(number for _, _, number in ground.evictions(have)),
        one_domain=int(bool(domain)),
        made=made,
    )


class _Class(NamedTuple):
    """Machines that are alike for one shard."""

    machines: int
    takers: int
    """Which of the evictions that are dangerous to it take them (bits: numbers of evictions)."""
    in_domain: bool
    """Whether they lie in the one domain that it lies in."""
    standby: int

    @classmethod
    def of(
        cls, part: int, ground: Ground, dangers: Sequence[tuple[str, int, int]], domain: int
    ) -> _Class:
        takers = 0
        for index, (_, taken, _) in enumerate(dangers):
            if not part & ~taken:
                takers |= 1 << index
        return cls(part, takers, not part & ~domain, int(not part & ground.hosts))


def _share_out(
    ground: Ground,
    ranks: tuple[int, ...],
    machines: int,
    keep: Mapping[int, Partners],
    partners: dict[int, Partners],
) -> None:
    """Say which of the ranks sends to which machine: who does already, else who has least to do."""
    for agent in ground.agents(machines):
        sender = next((rank for rank in ranks if agent in keep.get(rank, ())), None)
        if sender is None:
            able = [rank for rank in ranks if (ground.seats[rank], agent) not in ground.avoid]
            sender = min(able, key=lambda rank: (len(partners[rank]), rank))
        partners[sender] = (*partners[sender], agent)
