"""Spreading copies evenly over machines: pure, deterministic.

Each demand comes with all choices that are equally good for it; what is left to decide is which of
them loads the machines most evenly (least sum of squared loads). A first choice, made greedily, is
improved along paths of exchanges. With one machine per demand, no such path left means optimal
(Harvey, Ladner, Lovász, Tamir: Semi-matchings for bipartite graphs and load balancing, 2006); with
several it need not, so cases that are not at the floor are then searched through, if small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import combinations, product

SEARCHED_SHARDS = 24
SEARCHED_CHOICES = 20_000
"""A search that has to try more is given up, or not begun: what exchanges found is good enough."""


@dataclass(frozen=True)
class Demand:
    """One shard's wish: every one of `options` is as good. An option is a tuple of disjoint sets of
    machines (bit masks), one entry for each machine to be taken from that set."""

    home: int
    """Index of the machine that it is of."""
    kept: int
    """Machines that have a copy already, and stay."""
    options: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Machines to be chosen; the same in every option."""
        return len(self.options[0])

    def sets(self) -> Iterator[tuple[int, ...]]:
        """Every choice of single machines (as indices)."""
        for option in self.options:
            parts = sorted(set(option))
            ways = [combinations(_indices(part), option.count(part)) for part in parts]
            for chosen in product(*ways):
                yield tuple(index for some in chosen for index in some)


def balance(demands: Sequence[Demand], machines: int) -> tuple[list[int], int]:
    """The machines chosen for each demand (a mask), and the sum of squared loads."""
    spread = _Spread(demands, machines)
    spread.choose_greedily()
    while spread.improve():
        pass
    if any(demand.size > 1 for demand in demands) and len(demands) <= SEARCHED_SHARDS:
        spread.search_through()
    return spread.chosen, sum(load * load for load in spread.loads)


class _Spread:
    def __init__(self, demands: Sequence[Demand], machines: int) -> None:
        self._demands = demands
        self.chosen = [0] * len(demands)
        self.loads = [0] * machines
        self._copies_at: list[set[int]] = [set() for _ in range(machines)]
        self._levels = [(1 << machines) - 1]
        """By load: the machines that have it."""
        for demand in demands:
            for index in _indices(demand.kept):
                self._load(index, 1)
        self._kept_loads = tuple(self.loads)
        self._usable = 0
        for part in {part for one in demands for option in one.options for part in option}:
            self._usable |= part

    # --- greedily -------------------------------------------------------------------------------

    def choose_greedily(self) -> None:
        """Least loaded first; of those under the fair share, partners that are mutual, then those
        that the home sends to already: fewer sets of machines are fatal then."""
        total = sum(self.loads) + sum(demand.size for demand in self._demands)
        self._fair = -(-total // max(1, self._usable.bit_count()))
        self._senders = [0] * len(self.loads)  # to each machine: who sends to it
        self._targets = [0] * len(self.loads)
        for number, demand in enumerate(self._demands):
            option = min(demand.options, key=self._added)
            for part in option:
                index = self._best(part & ~self.chosen[number], demand.home)
                self._put(number, index)
                self._senders[index] |= 1 << demand.home
                self._targets[demand.home] |= 1 << index

    def _added(self, option: tuple[int, ...]) -> int:
        """What the option adds to the sum of squares, about: each part's least load."""
        return sum(self._least(part) for part in option)

    def _best(self, part: int, home: int) -> int:
        least = self._least(part)
        if least < self._fair:
            below = 0
            for level in self._levels[: self._fair]:
                below |= level
            for liked in (self._senders[home], self._targets[home]):
                if liked & below & part:
                    return next(_indices(liked & below & part))
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
        """Machines that can take the demand's copy from machine `index`, all else as it is."""
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
        """Carry out the exchanges, last one first. Undone if one stands in another's way."""
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
        """Try all choices, in breadth, by the loads they lead to; cut what cannot get better."""
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
            loads = min(states, key=lambda one: (sum(load * load for load in one), one))
            self.loads = list(loads)
            self.chosen = [_mask(chosen) for chosen in states[loads]]

    def _floor(self, loads: Sequence[int], more: int) -> int:
        """The least sum of squares that `more` copies can lead to, put wherever there is least."""
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
