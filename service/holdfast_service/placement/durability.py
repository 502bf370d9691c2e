"""What a placement of memory checkpoints survives, and what not: in words, and as probabilities.

Pure. A shard survives the loss of machines if one of them that has it live or keeps a copy is
left. The odds are of `k` machines lost at once, each set of `k` as likely as any other, among those
that hold state; what replicas reach in time is not their subject.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import comb, sqrt
from typing import Any

from holdfast_service.placement.rank_assignment import listed
from holdfast_service.placement.replica_placement import Group, Placement, Shard

TOO_FEW = "the machines of other domains are too few to keep so many copies"
MOST_LOST = 4
"""The odds are shown for up to so many machines."""

EXACT_SETS = 5000
"""Up to so many sets of lost machines all are tried; of more, as many are drawn."""


@dataclass(frozen=True)
class Gap:
    """Something that a placement does not protect against. `ranks`: whose state would be lost."""

    what: str
    ranks: tuple[int, ...]
    why: str

    @property
    def words(self) -> str:
        return f"{self.what} loses the state of {listed(self.ranks)}: {self.why}"


@dataclass(frozen=True)
class Odds:
    """`standard_error` is 0 where all sets were tried."""

    probability: float
    standard_error: float = 0.0


def gaps(placement: Placement) -> list[Gap]:
    """Everything that the placement was to protect against and does not, and why."""
    return [*_short_of_copies(placement), *_evictions(placement), *_domains(placement)]


def protection(placement: Placement) -> dict[str, Any]:
    """All of it as JSON: partners, gaps in words, and the odds for a few machines lost at once."""
    ground = placement.ground
    holders = {frozenset(ground.agents(one.home | one.copies)) for one in placement.shards}
    machines = len({name for one in holders for name in one})
    odds = {k: recovery_odds(holders, k) for k in range(1, min(machines, MOST_LOST) + 1)}
    return {
        "copies": placement.wanted,
        "partners": {str(rank): list(those) for rank, those in placement.partners.items()},
        "recoverable": {str(k): asdict(one) for k, one in odds.items()},
        "unprotected": [gap.words for gap in gaps(placement)],
    }


def recovery_odds(holders: Iterable[frozenset[str]], lost: int, seed: int = 0) -> Odds:
    """The probability that every state is still in memory after `lost` machines went at once.

    `holders`: for every state, the machines that have it. Raises ValueError if there are not as
    many machines.
    """
    distinct = set(holders)
    fatal = _least_sets(distinct)
    everyone = sorted({name for machines in distinct for name in machines})
    if not 0 <= lost <= len(everyone):
        raise ValueError(f"{lost} of {len(everyone)} machines cannot be lost")
    bit = {name: 1 << index for index, name in enumerate(everyone)}
    masks = [sum(bit[name] for name in machines) for machines in fatal]
    sets = comb(len(everyone), lost)
    if sets <= EXACT_SETS:
        tried = combinations(bit.values(), lost)
        return Odds(sum(_survives(sum(one), masks) for one in tried) / sets)
    draw = random.Random(seed)
    bits = list(bit.values())
    survived = sum(_survives(sum(draw.sample(bits, lost)), masks) for _ in range(EXACT_SETS))
    share = survived / EXACT_SETS
    return Odds(share, sqrt(share * (1 - share) / EXACT_SETS))


def _short_of_copies(placement: Placement) -> list[Gap]:
    wanted = placement.wanted
    if not wanted:
        everybody = tuple(sorted(placement.partners))
        return [Gap("losing a node", everybody, "checkpoint.memory.copies is 0")]
    found: dict[tuple[int, str], list[int]] = {}
    for shard in placement.shards:
        copies = (shard.home | shard.copies).bit_count() - 1
        if copies < wanted:
            found.setdefault((copies, _why_short(placement, shard)), []).extend(shard.ranks)
    return [
        Gap(f"losing {copies + 1} node{'s' if copies else ''} at once", tuple(sorted(ranks)), why)
        for (copies, why), ranks in sorted(found.items())
    ]


def _why_short(placement: Placement, shard: Shard) -> str:
    ground = placement.ground
    others = (ground.everywhere & ~shard.home).bit_count()
    if ground.reachable(shard.ranks) & ~shard.home != ground.everywhere & ~shard.home:
        return f"replication to some of the {others} other machines failed before"
    return f"{placement.wanted} copies are wanted, and there are {others} other machines"


def _evictions(placement: Placement) -> list[Gap]:
    ground = placement.ground
    lost: dict[tuple[str, int], list[Shard]] = {}
    for shard in placement.shards:
        for axis, taken, _ in ground.evictions(shard.home | shard.copies):
            lost.setdefault((axis, taken), []).append(shard)
    found: list[Gap] = []
    for (axis, taken), those in lost.items():
        ranks = tuple(sorted(rank for shard in those for rank in shard.ranks))
        what = f"evicting all machines of {_groups(ground.groups_of(axis, taken))}"
        found.append(Gap(what, ranks, _why_taken(placement, taken, those[0])))
    return sorted(found, key=lambda gap: (gap.what, gap.ranks))


def _groups(those: Sequence[Group]) -> str:
    one = f"the {those[0].axis} group of {listed(those[0].ranks)}"
    return one if len(those) == 1 else f"{one} (and of {len(those) - 1} more on the same machines)"


def _why_taken(placement: Placement, taken: int, shard: Shard) -> str:
    ground = placement.ground
    outside = ground.hosts & ~taken
    if not outside:
        return "no legal placement: the group is on every machine that trains"
    if not placement.wanted:
        return "checkpoint.memory.copies is 0"
    if shard.kept:
        return "the partners that hold the state already are kept until the next attempt"
    why = (
        "no legal placement: no choice of partners lies outside of all groups on its machine "
        f"with checkpoint.memory.copies {placement.wanted}"
    )
    failed = ground.agents(outside & ~ground.reachable(shard.ranks))
    return f"{why}; replication to {', '.join(failed)} failed before" if failed else why


def _domains(placement: Placement) -> list[Gap]:
    ground, wanted = placement.ground, placement.wanted
    lost: dict[int, list[Shard]] = {}
    for shard in placement.shards:
        domain = ground.domain(shard.home | shard.copies)
        if domain and wanted:
            lost.setdefault(domain, []).append(shard)
    found: list[Gap] = []
    for domain, those in sorted(lost.items()):
        name = ground.machines[(domain & -domain).bit_length() - 1].domain
        ranks = tuple(sorted(rank for shard in those for rank in shard.ranks))
        others = ground.everywhere & ~domain
        why = "no machine of the job is in another domain"
        if not placement.crosses_domains:
            why = TOO_FEW
        elif others:
            why = "no partner in another domain also lies outside of the groups on its machine"
            if not others & ground.reachable(those[0].ranks):
                why = "replication to the machines of other domains failed before"
        found.append(Gap(f"losing the failure domain {name}", ranks, why))
    return found


def _least_sets(holders: set[frozenset[str]]) -> list[frozenset[str]]:
    """Without those that contain another: to lose the larger is to lose the smaller."""
    kept: list[frozenset[str]] = []
    for one in sorted(holders, key=lambda machines: (len(machines), sorted(machines))):
        if not any(other <= one for other in kept):
            kept.append(one)
    return kept


def _survives(lost: int, fatal: Sequence[int]) -> bool:
    return not any(one & lost == one for one in fatal)
