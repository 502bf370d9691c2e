"""Plans which boxes a rank of a new mesh copies from the ranks of another mesh.

Pure: layouts in, a plan out. A plan is a list of boxes, not of byte ranges, because a tensor cut
along an inner dimension is many short ranges but one box. Promises: every element of every target
tensor is written exactly once; boxes that a source on the target's own node holds are taken from
there, so the number of bytes that cross the network is minimal; boxes that several other nodes
hold are balanced over those nodes.

Per-rank state (a rank's own bytes) has no meaning on another mesh: only the same rank of the same
mesh takes it, otherwise the target keeps its own. The small state is the same on every rank, so
any source provides it. Of a local entry, a rank of the same mesh takes its own values, any other
rank those of the primary.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from holdfast_workers.checkpoint.boxes import Box
from holdfast_workers.errors import WorkersError
from holdfast_workers.state.layout import SMALL_STATE, StateLayout, TensorEntry
from holdfast_workers.state.object_room import is_object


class NotCovered(WorkersError):
    """The sources together do not hold every element of the target."""

    def __init__(self, missing: dict[str, int]) -> None:
        named = ", ".join(f"{name} ({nbytes} bytes)" for name, nbytes in list(missing.items())[:5])
        super().__init__(f"{len(missing)} tensors are not covered by any source: {named}")
        self.missing = missing


class ModelMismatch(WorkersError):
    """A source holds a tensor of the same name with another dtype or shape."""


@dataclass(frozen=True)
class MoveSource:
    """The payload of one rank, on one node.

    `near`: that node is the target's own. A payload that several nodes hold is one source per
    node; `holder` distinguishes them.
    """

    holder: str
    rank: int
    layout: StateLayout
    near: bool = False


@dataclass(frozen=True)
class Move:
    """Copies one box from a tensor of a source to a tensor of the target.

    `source` is an index into the plan's sources; `source_tensor` and `tensor` are indices into the
    layouts of the source and of the target.
    """

    source: int
    source_tensor: int
    tensor: int
    box: Box
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """The moves of one target. `left`: names of entries that keep the target's own content."""

    moves: tuple[Move, ...]
    left: tuple[str, ...] = ()

    def by_source(self) -> dict[int, tuple[Move, ...]]:
        grouped: dict[int, list[Move]] = defaultdict(list)
        for move in self.moves:
            grouped[move.source].append(move)
        return {source: tuple(moves) for source, moves in sorted(grouped.items())}


def box_of(entry: TensorEntry) -> Box:
    return Box(entry.offsets, entry.shape)


def plan_moves(
    target: StateLayout, sources: Sequence[MoveSource], rank: int, *, same_mesh: bool = False
) -> Plan:
    """The moves that fill `target`, the layout of `rank`.

    `same_mesh`: the sources are ranks of the same mesh as `rank`. Raises NotCovered or
    ModelMismatch.
    """
    boxes = _BoxIndex(sources, rank if same_mesh else None)
    load: dict[str, int] = defaultdict(int)
    moves: list[Move] = []
    missing: dict[str, int] = {}
    left: list[str] = []
    for index, entry in enumerate(target.tensors):
        holders = boxes.holders(entry)
        if entry.per_rank and not holders and entry.name != SMALL_STATE:
            left.append(entry.name)
            continue
        entry_moves, missing_bytes = _cover(index, entry, holders, sources, load, rank)
        moves += entry_moves
        if missing_bytes:
            missing[entry.name] = missing_bytes
    if missing:
        raise NotCovered(missing)
    return Plan(tuple(moves), tuple(left))


@dataclass
class _Holders:
    """The holders of one box: (index of the source, index of the tensor in its layout)."""

    near: list[tuple[int, int]] = field(default_factory=list)
    far: list[tuple[int, int]] = field(default_factory=list)


class _BoxIndex:
    """Indexes the sources' tensors by name and box."""

    def __init__(self, sources: Sequence[MoveSource], own_rank: int | None) -> None:
        self._boxes: dict[str, dict[Box, _Holders]] = defaultdict(dict)
        self._kinds: dict[str, tuple[object, ...]] = {}
        for number, source in enumerate(sources):
            for index, entry in enumerate(source.layout.tensors):
                if entry.is_local and not _is_for(own_rank, entry, source.rank):
                    continue
                _check(entry, self._kinds.setdefault(entry.name, _kind(entry)))
                if math.prod(entry.shape):
                    holders = self._boxes[entry.name].setdefault(box_of(entry), _Holders())
                    (holders.near if source.near else holders.far).append((number, index))

    def holders(self, entry: TensorEntry) -> dict[Box, _Holders]:
        if entry.name in self._kinds:
            _check(entry, self._kinds[entry.name])
        return self._boxes.get(entry.name, {})


def _cover(
    tensor: int,
    entry: TensorEntry,
    holders: dict[Box, _Holders],
    sources: Sequence[MoveSource],
    load: dict[str, int],
    rank: int,
) -> tuple[list[Move], int]:
    """Moves that fill one tensor, and the number of its bytes that no source holds."""
    if not entry.nbytes:
        return [], 0
    item_bytes = entry.nbytes // math.prod(entry.shape)
    moves: list[Move] = []
    open_boxes = [box_of(entry)]

    def take(box: Box, held_by: list[tuple[int, int]], *, near: bool) -> None:
        nonlocal open_boxes
        wanted = [common for rest in open_boxes if (common := rest.intersect(box)) is not None]
        if not wanted:
            return
        open_boxes = [rest for previous in open_boxes for rest in previous.minus(box)]
        source, source_tensor = held_by[0] if near else _least_loaded(held_by, sources, load, rank)
        for common in wanted:
            move = Move(source, source_tensor, tensor, common, common.volume * item_bytes)
            load[sources[source].holder] += move.nbytes
            moves.append(move)

    for box, held in holders.items():
        if held.near:
            take(box, held.near, near=True)
    for box, held in holders.items():
        if held.far:
            take(box, held.far, near=False)
    return moves, sum(box.volume for box in open_boxes) * item_bytes


def _least_loaded(
    held_by: Iterable[tuple[int, int]],
    sources: Sequence[MoveSource],
    load: dict[str, int],
    rank: int,
) -> tuple[int, int]:
    """The (source, tensor) of the holder with the least load so far.

    The target's rank breaks ties, so that not all ranks begin with the same holder. If one holder
    has a box several times, all ranks take the first, because a payload is verified before it is
    served.
    """
    first: dict[str, tuple[int, int]] = {}
    for source, tensor in held_by:
        first.setdefault(sources[source].holder, (source, tensor))
    order = {holder: index for index, holder in enumerate(first)}
    least = min(first, key=lambda holder: (load[holder], (order[holder] - rank) % len(first)))
    return first[least]


def _is_for(own_rank: int | None, entry: TensorEntry, rank: int) -> bool:
    """Whether the target takes its local entry from this rank's. `own_rank`: the target's rank, if
    the mesh is the same."""
    return rank == own_rank or (own_rank is None and entry.local and entry.primary)


def _kind(entry: TensorEntry) -> tuple[object, ...]:
    if is_object(entry):  # its size is only its room
        return (entry.dtype.removeprefix("torch."), entry.per_rank)
    return (entry.dtype.removeprefix("torch."), entry.global_shape, entry.per_rank)


def _check(entry: TensorEntry, kind: tuple[object, ...]) -> None:
    if _kind(entry) != kind:
        raise ModelMismatch(f"{entry.name} is {_kind(entry)} here and {kind} there")
