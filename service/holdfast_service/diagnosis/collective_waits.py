"""Derives which ranks wait for which others from the sequence numbers of their collectives. Pure.

All ranks of a world run one program: on each axis of the mesh they enter the same collectives in
the same order. So a rank that has entered a collective and not left it waits for the ranks of its
group that have not entered it yet. A rank has diverged from the program if it is past the position
of a collective that it has not entered, or if its n-th collective differs from that of its peers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import TypeVar

from holdfast_service.placement.mesh_axes import MESH_AXES
from holdfast_service.placement.replica_placement import AxisGroup, coordinates, groups
from holdfast_workers.protocol.messages import Beat, GroupBeat
from holdfast_workers.state.joined_axes import joined

ValueT = TypeVar("ValueT")
WORLD = "world"
PIPELINE = "pp"
LINKED = (PIPELINE, "cp")
"""Axes whose ranks send to their neighbours."""
PHASES = (
    "load",
    "forward",
    "backward",
    "reduce",
    "agree",
    "hold",
    "optimizer",
    "evaluation",
    "checkpoint",
    "save",
    "evaluate",
    "user",
)
AFTER_MICRO_BATCHES = PHASES.index("reduce")


@dataclass(frozen=True)
class Waits:
    """`on`: rank -> rank that it waits for -> collective. `stuck`: rank -> group of the collective
    in which it still is although every member has entered."""

    on: Mapping[int, Mapping[int, str]]
    stuck: Mapping[int, AxisGroup]

    def root_blockers(self) -> list[frozenset[int]]:
        """Sets of ranks that others wait for and that wait only for each other: single ranks, or
        ranks that wait in a cycle."""
        reach = _reach(self.on)
        awaited = {other for others in self.on.values() for other in others}
        found: set[frozenset[int]] = set()
        for rank in awaited:
            cycle = frozenset({rank} | {other for other in reach[rank] if rank in reach[other]})
            if reach[rank] <= cycle:
                found.add(cycle)
        return sorted(found, key=min)


def all_groups(mesh: Mapping[str, int]) -> list[AxisGroup]:
    """Every process group that beats can report: those of the axes, those of the axes whose ranks
    share a state, the world, and the links between neighbours."""
    ranks = range(prod(mesh.values()))
    of_axes = groups(mesh, ranks)
    links = [link for group in of_axes if group.axis in LINKED for link in _links(group)]
    whole = AxisGroup(WORLD, tuple(ranks))
    return [*of_axes, *_joined_groups(mesh, ranks), *links, whole]


def _joined_groups(mesh: Mapping[str, int], ranks: Iterable[int]) -> list[AxisGroup]:
    """The groups over all axes that share a state, if there are several."""
    shared = [axis.name for axis in MESH_AXES if axis.shards_state and axis.name in mesh]
    if len(shared) < 2:
        return []
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        places = zip(mesh, coordinates(rank, mesh), strict=True)
        members.setdefault(tuple(at for axis, at in places if axis not in shared), []).append(rank)
    return [AxisGroup(joined(*shared), tuple(group)) for group in members.values()]


def _links(group: AxisGroup) -> list[AxisGroup]:
    """The links from each rank of a group to the one after it and the one before it, round the
    ring: a transfer counts like a collective of the two (`parallelize/counted_transfers.py`)."""
    ranks = group.ranks
    ends = {(i, (i + step) % len(ranks)) for i in range(len(ranks)) for step in (1, -1)}
    return [
        AxisGroup(f"{group.axis} {source}>{target}", (ranks[source], ranks[target]))
        for source, target in sorted(ends)
        if source != target
    ]


def find_waits(
    mesh: Mapping[str, int], beats: Mapping[int, Beat], unknown: Collection[int] = ()
) -> Waits:
    """The waits of a world. `beats` by rank. Ranks in `unknown` have no beat: they count as awaited
    wherever no other rank is absent."""
    on: dict[int, dict[int, str]] = {}
    stuck: dict[int, AxisGroup] = {}
    for group in all_groups(mesh):
        counts = {rank: _in(beats[rank], group.axis) for rank in group.ranks if rank in beats}
        for rank, mine in counts.items():
            if mine is None or mine.entered <= mine.left:
                continue
            absent = [other for other, theirs in counts.items() if _is_absent(theirs, mine)]
            absent = absent or [other for other in group.ranks if other in unknown]
            where = f"{mine.kind} {mine.entered} of {group.axis}"
            on.setdefault(rank, {}).update(dict.fromkeys(absent, where))
            if not absent:
                stuck[rank] = group
    return Waits({rank: absent for rank, absent in on.items() if absent}, stuck)


def position(beat: Beat) -> tuple[int, bool, int, int]:
    """A rank's position in the common program; comparable between ranks."""
    phase = PHASES.index(beat.phase) if beat.phase in PHASES else 0
    after = phase >= AFTER_MICRO_BATCHES
    return beat.step, after, 0 if after else beat.micro_batch, phase


def diverged_ranks(
    mesh: Mapping[str, int], beats: Mapping[int, Beat], seen: Waits
) -> dict[int, str]:
    """The ranks that have diverged from the common program, with the evidence. The stages of a
    pipeline have programs of their own, so only ranks of one stage are compared."""
    found: dict[int, str] = {}
    for rank, absent in seen.on.items():
        for other, where in absent.items():
            alike = _stage_of(rank, mesh) == _stage_of(other, mesh)
            if alike and other in beats and position(beats[other]) > position(beats[rank]):
                found.setdefault(other, f"is past {where}, which it has not entered")
    if found:
        return found
    by_stage: dict[int, dict[int, Beat]] = {}
    for rank, beat in beats.items():
        by_stage.setdefault(_stage_of(rank, mesh), {})[rank] = beat
    for comparable in by_stage.values():
        found |= _of_other_kind(comparable)
    for comparable in () if found else by_stage.values():
        found |= _out_of_order(mesh, comparable)
    return found


def _stage_of(rank: int, mesh: Mapping[str, int]) -> int:
    """The rank's place in its pipeline; 0 where there is none."""
    axes = list(mesh)
    return coordinates(rank, mesh)[axes.index(PIPELINE)] if PIPELINE in axes else 0


def _of_other_kind(beats: Mapping[int, Beat]) -> dict[int, str]:
    """Ranks whose n-th collective on an axis has another kind than that of most ranks."""
    kinds: dict[tuple[str, int], dict[int, str]] = {}
    for rank, beat in beats.items():
        for group in beat.groups:
            kinds.setdefault((group.group, group.entered), {})[rank] = group.kind
    found: dict[int, str] = {}
    for (axis, number), by_rank in kinds.items():
        common = _majority(by_rank.values())
        for rank, kind in by_rank.items():
            if common is not None and kind != common:
                found[rank] = (
                    f"is in {kind} as collective {number} of {axis}, the others in {common}"
                )
    return found


def _out_of_order(mesh: Mapping[str, int], beats: Mapping[int, Beat]) -> dict[int, str]:
    """A rank that is ahead of its peers on one axis and behind them on another; or ranks in one
    collective with others, whose counts on another axis differ from those of the others."""
    counts = {rank: _counts(beat) for rank, beat in beats.items()}
    alike: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in sorted(counts):
        alike.setdefault(counts[rank], []).append(rank)
    crossings: Counter[int] = Counter()
    for left, right in combinations(alike, 2):
        if _cross(dict(left), dict(right)):
            crossings.update(dict.fromkeys(alike[left], len(alike[right])))
            crossings.update(dict.fromkeys(alike[right], len(alike[left])))
    (most, times), (_, next_times) = [*crossings.most_common(2), (-1, 0), (-1, 0)][:2]
    if times > next_times:
        return {most: "is ahead of its peers on one axis and behind them on another"}
    for group in all_groups(mesh):
        inside = {
            rank: counts[rank]
            for rank in group.ranks
            if rank in beats and _is_inside(beats[rank], group.axis)
        }
        common = _majority(inside.values())
        if common is not None and any(count != common for count in inside.values()):
            return {
                rank: f"is in {group.axis} with its peers, but skipped a collective elsewhere"
                for rank, count in inside.items()
                if count != common
            }
    return {}


def _counts(beat: Beat) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((group.group, group.entered) for group in beat.groups))


def _cross(left: Mapping[str, int], right: Mapping[str, int]) -> bool:
    pairs = [(n, right.get(axis, 0)) for axis, n in left.items()]
    return any(a < b for a, b in pairs) and any(a > b for a, b in pairs)


def _is_absent(theirs: GroupBeat | None, mine: GroupBeat) -> bool:
    """Whether another rank (`theirs`) is not in the collective that this rank entered last."""
    if theirs is None or theirs.entered < mine.entered:
        return True
    return theirs.entered == mine.entered and theirs.kind != mine.kind


def _is_inside(beat: Beat, axis: str) -> bool:
    group = _in(beat, axis)
    return group is not None and group.entered > group.left


def _in(beat: Beat, axis: str) -> GroupBeat | None:
    return next((group for group in beat.groups if group.group == axis), None)


def _majority(values: Iterable[ValueT]) -> ValueT | None:
    """The value of more than half of them, if any."""
    held = list(values)
    most = Counter(held).most_common(1)
    return most[0][0] if most and 2 * most[0][1] > len(held) else None


def _reach(edges: Mapping[int, Mapping[int, str]]) -> dict[int, frozenset[int]]:
    """The ranks that each rank waits for, directly or through others."""
    found: dict[int, frozenset[int]] = {}
    all_ranks = set(edges) | {other for others in edges.values() for other in others}
    for start in all_ranks:
        seen: set[int] = set()
        ahead = list(edges.get(start, ()))
        while ahead:
            rank = ahead.pop()
            if rank not in seen:
                seen.add(rank)
                ahead.extend(edges.get(rank, ()))
        found[start] = frozenset(seen)
    return found
