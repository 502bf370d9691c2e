"""Evaluates which losses a placement of memory checkpoints survives, and how likely. Pure.

A shard survives a loss of machines if at least one machine with its live state or a copy is left.
The probabilities are for `k` machines lost at once, among the machines that hold state, with every
set of `k` equally likely. They do not consider whether replication completes in time.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb, sqrt

from holdfast_service.placement.memory_protection import MemoryProtection, Odds
from holdfast_service.placement.rank_assignment import format_ranks
from holdfast_service.placement.replica_placement import AxisGroup, Placement, Shard

TOO_FEW = "the machines of other domains are too few to keep so many copies"
MAX_LOST = 4
"""Largest number of lost machines for which a probability is computed."""

EXACT_SETS = 5000
"""Up to this number of sets of lost machines, all are evaluated; otherwise so many are sampled."""


@dataclass(frozen=True)
class ProtectionGap:
    """A loss that a placement does not survive. `ranks`: the ranks whose state would be lost."""

    what: str
    ranks: tuple[int, ...]
    why: str
    inherent: bool = False
    """Whether no placement on any machines of the job could survive it."""

    @property
    def text(self) -> str:
        ranks = format_ranks(self.ranks)
        return f"{self.what} would lose the memory checkpoints of {ranks}: {self.why}"


def gaps(placement: Placement) -> list[ProtectionGap]:
    """All losses that the placement should survive but does not, with the reasons."""
    return [*_short_of_copies(placement), *_evictions(placement), *_domains(placement)]


def protection(placement: Placement) -> MemoryProtection:
    """The partners, the gaps, and the probabilities for a few lost machines."""
    topology = placement.topology
    holders = {frozenset(topology.agents(shard.home | shard.copies)) for shard in placement.shards}
    count = len({name for machines in holders for name in machines})
    odds = {k: recovery_odds(holders, k) for k in range(1, min(count, MAX_LOST) + 1)}
    kept = ((shard.home | shard.copies).bit_count() - 1 for shard in placement.shards)
    return MemoryProtection(
        copies=min(kept, default=0),
        partners={rank: tuple(agents) for rank, agents in placement.partners.items()},
        recoverable=odds,
        unprotected=tuple(gap.text for gap in gaps(placement) if not gap.inherent),
    )


def recovery_odds(holders: Iterable[frozenset[str]], lost: int, seed: int = 0) -> Odds:
    """The probability that every state is still in memory after `lost` machines fail at once.

    `holders`: for each state, the machines that have it. Raises ValueError if there are fewer than
    `lost` machines.
    """
    distinct = set(holders)
    fatal = _minimal_sets(distinct)
    all_machines = sorted({name for machines in distinct for name in machines})
    if not 0 <= lost <= len(all_machines):
        raise ValueError(f"{lost} of {len(all_machines)} machines cannot be lost")
    bit = {name: 1 << index for index, name in enumerate(all_machines)}
    masks = [sum(bit[name] for name in machines) for machines in fatal]
    sets = comb(len(all_machines), lost)
    if sets <= EXACT_SETS:
        tried = combinations(bit.values(), lost)
        survived = sum(_survives(sum(machines), masks) for machines in tried)
        return Odds(survived / sets, 0.0)
    draw = random.Random(seed)
    bits = list(bit.values())
    survived = sum(_survives(sum(draw.sample(bits, lost)), masks) for _ in range(EXACT_SETS))
    share = survived / EXACT_SETS
    return Odds(share, sqrt(share * (1 - share) / EXACT_SETS))


def _short_of_copies(placement: Placement) -> list[ProtectionGap]:
    wanted = placement.wanted
    if not wanted:
        all_ranks = tuple(sorted(placement.partners))
        return [ProtectionGap("losing a node", all_ranks, "checkpoint.memory.copies is 0")]
    found: dict[tuple[int, str], list[int]] = {}
    for shard in placement.shards:
        copies = (shard.home | shard.copies).bit_count() - 1
        if copies < wanted:
            found.setdefault((copies, _why_short(placement, shard)), []).extend(shard.ranks)
    return [
        ProtectionGap(
            f"losing {copies + 1} node{'s' if copies else ''} at once", tuple(sorted(ranks)), why
        )
        for (copies, why), ranks in sorted(found.items())
    ]


def _why_short(placement: Placement, shard: Shard) -> str:
    topology = placement.topology
    others = (topology.everywhere & ~shard.home).bit_count()
    if topology.reachable(shard.ranks) & ~shard.home != topology.everywhere & ~shard.home:
        return f"replication to some of the {others} other machines failed before"
    if not others:
        return "the job has one node, and a copy needs another one: give it more nodes"
    return f"checkpoint.memory.copies is {placement.wanted}, and the job has {others} other nodes"


def _evictions(placement: Placement) -> list[ProtectionGap]:
    topology = placement.topology
    lost: dict[tuple[str, int], list[Shard]] = {}
    for shard in placement.shards:
        for axis, taken, _ in topology.evictions(shard.home | shard.copies):
            lost.setdefault((axis, taken), []).append(shard)
    found: list[ProtectionGap] = []
    for (axis, taken), shards in lost.items():
        ranks = tuple(sorted(rank for shard in shards for rank in shard.ranks))
        what = f"evicting all machines of {_describe_groups(topology.groups_of(axis, taken))}"
        why, inherent = _why_taken(placement, taken, shards[0]), not topology.hosts & ~taken
        found.append(ProtectionGap(what, ranks, why, inherent))
    return sorted(found, key=lambda gap: (gap.what, gap.ranks))


def _describe_groups(groups: Sequence[AxisGroup]) -> str:
    text = f"the {groups[0].axis} group of {format_ranks(groups[0].ranks)}"
    if len(groups) == 1:
        return text
    return f"{text} (and of {len(groups) - 1} more on the same machines)"


def _why_taken(placement: Placement, taken: int, shard: Shard) -> str:
    topology = placement.topology
    outside = topology.hosts & ~taken
    if not outside:
        return "no legal placement: the group is on every machine that trains"
    if not placement.wanted:
        return "checkpoint.memory.copies is 0"
    if shard.kept:
        return "partners that already hold the state are kept until the next attempt"
    why = (
        "no legal placement: no choice of partners lies outside of all groups on its machine "
        f"with checkpoint.memory.copies {placement.wanted}"
    )
    failed = topology.agents(outside & ~topology.reachable(shard.ranks))
    return f"{why}; replication to {', '.join(failed)} failed before" if failed else why


def _domains(placement: Placement) -> list[ProtectionGap]:
    topology, wanted = placement.topology, placement.wanted
    lost: dict[int, list[Shard]] = {}
    for shard in placement.shards:
        domain = topology.domain(shard.home | shard.copies)
        if domain and wanted:
            lost.setdefault(domain, []).append(shard)
    found: list[ProtectionGap] = []
    for domain, shards in sorted(lost.items()):
        name = topology.machines[(domain & -domain).bit_length() - 1].domain
        ranks = tuple(sorted(rank for shard in shards for rank in shard.ranks))
        others = topology.everywhere & ~domain
        why = "no machine of the job is in another failure domain"
        if not placement.crosses_domains:
            why = TOO_FEW
        elif others:
            why = "no partner in another domain is also outside of the groups of the machine"
            if not others & topology.reachable(shards[0].ranks):
                why = "replication to the machines of other domains failed before"
        found.append(ProtectionGap(f"losing the failure domain {name}", ranks, why))
    return found


def _minimal_sets(holders: set[frozenset[str]]) -> list[frozenset[str]]:
    """The sets that contain no other set: losing a larger set includes losing the smaller one."""
    kept: list[frozenset[str]] = []
    for holder in sorted(holders, key=lambda machines: (len(machines), sorted(machines))):
        if not any(other <= holder for other in kept):
            kept.append(holder)
    return kept


def _survives(lost: int, fatal: Sequence[int]) -> bool:
    return not any(machines & lost == machines for machines in fatal)
