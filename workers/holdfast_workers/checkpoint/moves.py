"""What a rank of a new mesh takes from which rank of another one. Pure: layouts in, a plan out.

A plan is a list of boxes, not of byte ranges: a tensor cut along an inner dimension is many short
ranges, but one box. Promises: every element of every target tensor is written exactly once; what a
source on the target's own node holds is taken there, so the bytes that cross the network are the
least there can be; what several other nodes hold is shared out among them.

State of one rank alone (bytes of its own) has no meaning on another mesh: it is taken only
by the same rank of the same mesh, and is left to the target otherwise. The small state is the same
on every rank, so any source has it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from holdfast_workers.checkpoint.boxes import Box
from holdfast_workers.errors import WorkersError
from holdfast_workers.state.layout import SMALL_STATE, StateLayout, TensorEntry


class NotCovered(WorkersError):
    """The sources together do not hold all of the target."""

    def __init__(self, missing: dict[str, int]) -> None:
        named = ", ".join(f"{name} ({nbytes} bytes)" for name, nbytes in list(missing.items())[:5])
        super().__init__(f"{len(missing)} tensors are not covered by any source: {named}")
        self.missing = missing


class OtherModel(WorkersError):
    """A source holds a tensor of this name with another dtype or shape."""


@dataclass(frozen=True)
class Source:
    """The payload of one rank. `near`: it lies on the target's own node. Where several nodes hold
    it, each is a source; `holder` tells them apart."""

    holder: str
    rank: int
    layout: StateLayout
    near: bool = False


@dataclass(frozen=True)
class Move:
    """One box, from a tensor of a source to the target's. Both are indices: of the source in the
    plan's sources, of the tensors in their layouts."""

    source: int
    source_tensor: int
    tensor: int
    box: Box
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """`left`: entries that stay as the target itself makes them."""

    moves: tuple[Move, ...]
    left: tuple[str, ...] = ()

    def by_source(self) -> dict[int, tuple[Move, ...]]:
        found: dict[int, list[Move]] = defaultdict(list)
        for move in self.moves:
            found[move.source].append(move)
        return {source: tuple(moves) for source, moves in sorted(found.items())}

    def moved_bytes(self, sources: Sequence[Source]) -> int:
        """What crosses the network."""
        return sum(move.nbytes for move in self.moves if not sources[move.source].near)


def box_of(entry: TensorEntry) -> Box:
    return Box(entry.offsets, entry.shape)


def plan_moves(
    target: StateLayout, sources: Sequence[Source], rank: int, *, same_mesh: bool = False
) -> Plan:
    """The moves that fill `target`, the layout of `rank`.

    `same_mesh`: the sources are ranks of the very mesh that `rank` is of. Raises NotCovered, or
    OtherModel.
    """
    shelf = _Shelf(sources, rank if same_mesh else None)
    load: dict[str, int] = defaultdict(int)
    moves: list[Move] = []
    missing: dict[str, int] = {}
    left: list[str] = []
    for index, entry in enumerate(target.tensors):
        holders = shelf.holders(entry)
        if entry.per_rank and not holders and entry.name != SMALL_STATE:
            left.append(entry.name)
            continue
        found, lacking = _cover(index, entry, holders, sources, load, rank)
        moves += found
        if lacking:
            missing[entry.name] = lacking
    if missing:
        raise NotCovered(missing)
    return Plan(tuple(moves), tuple(left))


@dataclass
class _Holders:
    """Who holds one and the same box: indices of sources and of the tensor in each."""

    near: list[tuple[int, int]] = field(default_factory=list)
    far: list[tuple[int, int]] = field(default_factory=list)


class _Shelf:
    """The sources' tensors by name and box."""

    def __init__(self, sources: Sequence[Source], own_rank: int | None) -> None:
        self._boxes: dict[str, dict[Box, _Holders]] = defaultdict(dict)
        self._kinds: dict[str, tuple[object, ...]] = {}
        for number, source in enumerate(sources):
            for at, entry in enumerate(source.layout.tensors):
                if entry.per_rank and entry.name != SMALL_STATE and source.rank != own_rank:
                    continue
                _check(entry, self._kinds.setdefault(entry.name, _kind(entry)))
                if math.prod(entry.shape):
                    holders = self._boxes[entry.name].setdefault(box_of(entry), _Holders())
                    (holders.near if source.near else holders.far).append((number, at))

    def holders(self, entry: TensorEntry) -> dict[Box, _Holders]:
        if entry.name in self._kinds:
            _check(entry, self._kinds[entry.name])
        return self._boxes.get(entry.name, {})


def _cover(
    tensor: int,
    entry: TensorEntry,
    holders: dict[Box, _Holders],
    sources: Sequence[Source],
    load: dict[str, int],
    rank: int,
) -> tuple[list[Move], int]:
    """Moves that fill one tensor, and how many of its bytes nobody holds."""
    if not entry.nbytes:
        return [], 0
    item_bytes = entry.nbytes // math.prod(entry.shape)
    moves: list[Move] = []
    open_boxes = [box_of(entry)]

    def take(box: Box, held_by: list[tuple[int, int]], *, near: bool) -> None:
        nonlocal open_boxes
        wanted = [common for one in open_boxes if (common := one.intersect(box)) is not None]
        if not wanted:
            return
        open_boxes = [rest for one in open_boxes for rest in one.minus(box)]
        source, at = held_by[0] if near else _least_loaded(held_by, sources, load, rank)
        for common in wanted:
            move = Move(source, at, tensor, common, common.volume * item_bytes)
            load[sources[source].holder] += move.nbytes
            moves.append(move)

    for box, one in holders.items():
        if one.near:
            take(box, one.near, near=True)
    for box, one in holders.items():
        if one.far:
            take(box, one.far, near=False)
    return moves, sum(box.volume for box in open_boxes) * item_bytes


def _least_loaded(
    held_by: Iterable[tuple[int, int]], sources: Sequence[Source], load: dict[str, int], rank: int
) -> tuple[int, int]:
    """Equal loads are told apart by the target's rank: ranks do not all begin with the same. Of
    what one holder has several times, all take the same one: it is verified before it gives."""
    first: dict[str, tuple[int, int]] = {}
    for one in held_by:
        first.setdefault(sources[one[0]].holder, one)
    order = {holder: at for at, holder in enumerate(first)}
    least = min(first, key=lambda one: (load[one], (order[one] - rank) % len(first)))
    return first[least]


def _kind(entry: TensorEntry) -> tuple[object, ...]:
    return (entry.dtype.removeprefix("torch."), entry.global_shape, entry.per_rank)


def _check(entry: TensorEntry, kind: tuple[object, ...]) -> None:
    if _kind(entry) != kind:
        raise OtherModel(f"{entry.name} is {_kind(entry)} here and {kind} there")
