"""Spreads copies evenly over machines. Pure and deterministic.

Each demand has a set of equally good options; this module chooses the options that load the
machines most evenly (least sum of squared loads). A greedy first choice is improved along paths of
exchanges. With one machine per demand, the result is optimal once no such path is left (Harvey,
Ladner, Lovász, Tamir: Semi-matchings for bipartite graphs and load balancing, 2006). With several
machines it may not be, so small cases above the lower bound are then searched exhaustively.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import combinations, product

SEARCHED_SHARDS = 24
SEARCHED_CHOICES = 20_000
"""Limits of the exhaustive search: beyond them, the result of the exchanges is used."""


@dataclass(frozen=True)
class ReplicaDemand:
    """The demand of one shard: all `options` are equally good. An option is a tuple of disjoint
    sets of machines (bit masks), with one entry for each machine to be taken from that set."""

    home: int
    """Index of the shard's own machine."""
    kept: int
    """Machines that already have a copy, which stays."""
    options: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Number of machines to choose; the same in every option."""
        return len(self.options[0])

    def sets(self) -> Iterator[tuple[int, ...]]:
        """Every possible set of machines (as indices)."""
        for option in self.options:
            parts = sorted(set(option))
            ways = [combinations(_indices(part), option.count(part)) for part in parts]
            for chosen in product(*ways):
                yield tuple(index for group in chosen for index in group)


def balance(demands: Sequence[ReplicaDemand], machines: int) -> tuple[list[int], int]:
    """The machines chosen for each demand (a mask), and the sum of squared loads."""
    spread = _Spread(demands, machines)
    spread.choose_greedily()
    while spread.improve():
        pass
    if any(demand.size > 1 for demand in demands) and len(demands) <= SEARCHED_SHARDS:
        spread.search_through()
    return spread.chosen, sum(load * load for load in spread.loads)


class _Spread:
    def __init__(self, demands: Sequence[ReplicaDemand], machines: int) -> None:
        self._demands = demands
        self.chosen = [0] * len(demands)
        self.loads = [0] * machines
        self._copies_at: list[set[int]] = [set() for _ in range(machines)]
        self._levels = [(1 << machines) - 1]
        """Load -> the machines with that load (bit mask)."""
        for demand in demands:
            for index in _indices(demand.kept):
                self._load(index, 1)
        self._kept_loads = tuple(self.loads)
        self._usable = 0
        for part in {part for demand in demands for option in demand.options for part in option}:
            self._usable |= part

    # --- greedily -------------------------------------------------------------------------------

    def choose_greedily(self) -> None:
        """Choose the least loaded machine. Among machines below the fair share, prefer a mutual
        partner, then one that the home already sends to: then fewer sets of machines are fatal."""
        total = sum(self.loads) + sum(demand.size for demand in self._demands)
        self._fair = -(-total // max(1, self._usable.bit_count()))
        self._senders = [0] * len(self.loads)  # machine -> machines that send to it
        self._targets = [0] * len(self.loads)
        for number, demand in enumerate(self._demands):
            option = min(demand.options, key=self._added)
            for part in option:
                index = self._best(part & ~self.chosen[number], demand.home)
                self._put(number, index)
                self._senders[index] |= 1 << demand.home
                self._targets[demand.home] |= 1 << index

    def _added(self, option: tuple[int, ...]) -> int:
        """The option's approximate addition to the sum of squares: each part's least load."""
        return sum(self._least(part) for part in option)

    def _best(self, part: int, home: int) -> int:
        least = self._least(part)
        if least < self._fair:
            below = 0
            for level in self._levels[: self._fair]:
                below |= level
            for preferred in (self._senders[home], self._targets[home]):
                if preferred & below & part:
                    return next(_indices(preferred & below & part))
        level = self._levels[least] & part
        return next(_indices(level >> home << home or level))

    def _least(self, part: int) -> int:
        return next(load for load, level in enumerate(self._levels) if level & part)

    def _put(self, number: int, index: int) -> None:
        self.chosen[number] |= 1 << index
        self._load(index, 1)
        self._copies_at[index].add(number)

    def _take(self, number: int, index: int) -> None:
        self.chosen[number] &= ~(1 << index)
        self._load(index, -1)
        self._copies_at[index].discard(number)

    def _load(self, index: int, more: int) -> None:
        self._levels[self.loads[index]] ^= 1 << index
        self.loads[index] += more
        if self.loads[index] == len(self._levels):
            self._levels.append(0)
        self._levels[self.loads[index]] |= 1 << index

    # --- exchanges ------------------------------------------------------------------------------

    def improve(self) -> bool:
        """Move one copy along a path of exchanges from a machine to one with two fewer."""
        for load in range(len(self._levels) - 1, 1, -1):
            low = 0
            for level in self._levels[: load - 1]:
                low |= level
            if self._levels[load] and low and self._shift(self._levels[load], low):
                return True
        return False

    def _shift(self, high: int, low: int) -> bool:
        came: dict[int, tuple[int, int]] = {}
        seen, frontier = high, list(_indices(high))
        while frontier:
            following: list[int] = []
            for index in frontier:
                for number in sorted(self._copies_at[index]):
                    for other in _indices(self._instead(number, index) & ~seen):
                        seen |= 1 << other
                        came[other] = (index, number)
                        if low >> other & 1:
                            return self._walk(other, came)
                        following.append(other)
            frontier = following
        return False

    def _instead(self, number: int, index: int) -> int:
        """Machines that can take the demand's copy from machine `index`, with no other change."""
        options = self._demands[number].options
        if len(options[0]) == 1:
            taken = 0
            for option in options:
                taken |= option[0]
            return taken & ~self.chosen[number]
        rest = self._parts(number, self.chosen[number] & ~(1 << index))
        found = 0
        for option in options:
            for part in set(option):
                left = list(option)
                left.remove(part)
                if sorted(left) == rest:
                    found |= part
        return found & ~self.chosen[number]

    def _parts(self, number: int, machines: int) -> list[int]:
        parts = {part for option in self._demands[number].options for part in option}
        return sorted(part for part in parts for _ in _indices(part & machines))

    def _walk(self, end: int, came: dict[int, tuple[int, int]]) -> bool:
        """Apply the exchanges from the last to the first; undo all if one prevents another."""
        done: list[tuple[int, int, int]] = []
        while end in came:
            start, number = came[end]
            if not self._instead(number, start) >> end & 1:
                for before, source, target in reversed(done):
                    self._take(before, target)
                    self._put(before, source)
                return False
            self._take(number, start)
            self._put(number, end)
            done.append((number, start, end))
            end = start
        return True

    # --- searching ------------------------------------------------------------------------------

    def search_through(self) -> None:
        """Search all choices breadth-first by their loads; prune states that cannot improve."""
        best = sum(load * load for load in self.loads)
        remaining = sum(demand.size for demand in self._demands)
        states: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {self._kept_loads: ()}
        if self._floor(self._kept_loads, remaining) >= best:
            return
        tried = 0
        for demand in self._demands:
            remaining -= demand.size
            following: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
            for loads, choices in states.items():
                for chosen in demand.sets():
                    tried += 1
                    if tried > SEARCHED_CHOICES:
                        return
                    grown = list(loads)
                    for index in chosen:
                        grown[index] += 1
                    state = tuple(grown)
                    if state not in following and self._floor(state, remaining) < best:
                        following[state] = (*choices, chosen)
            states = following
        if states:
            loads = min(states, key=lambda state: (sum(load * load for load in state), state))
            self.loads = list(loads)
            self.chosen = [_mask(chosen) for chosen in states[loads]]

    def _floor(self, loads: Sequence[int], more: int) -> int:
        """Least sum of squares after `more` copies, each on the least loaded machine then."""
        levels = [loads[index] for index in _indices(self._usable)]
        others = sum(load * load for load in loads) - sum(load * load for load in levels)
        heapify(levels)
        for _ in range(more if levels else 0):
            heapreplace(levels, levels[0] + 1)
        return others + sum(load * load for load in levels)


def _indices(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _mask(indices: Iterator[int] | Sequence[int]) -> int:
    found = 0
    for index in indices:
        found |= 1 << index
    return found
