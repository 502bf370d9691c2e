"""Who waits for whom, read from the sequence numbers of collectives. Pure.

All ranks of a world run one program: on each axis of the mesh they enter the same collectives in
the same order. So whoever has entered a collective and not left it waits for those of its group
that have not entered it yet; and who is beyond the place of a collective without having entered
it, or in another than its peers are in as their n-th, has left the common program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import TypeVar

from holdfast_service.placement.replica_placement import AxisGroup, groups
from holdfast_workers.protocol.messages import Beat, GroupBeat

T = TypeVar("T")
WORLD = "world"
PHASES = (
    "load",
    "forward",
    "backward",
    "reduce",
    "agree",
    "hold",
    "optimizer",
    "checkpoint",
    "save",
    "evaluate",
    "user",
)
AFTER_MICRO_BATCHES = PHASES.index("reduce")


@dataclass(frozen=True)
class Waits:
    """`on`: rank → rank it waits for → in which collective. `stuck`: rank → the group of a
    collective that it is in although every member has come."""

    on: Mapping[int, Mapping[int, str]]
    stuck: Mapping[int, AxisGroup]

    def last_in_line(self) -> list[frozenset[int]]:
        """Those that others wait for and that wait for nobody but each other: one rank, or some
        that wait in a circle."""
        reach = _reach(self.on)
        awaited = {other for others in self.on.values() for other in others}
        found: set[frozenset[int]] = set()
        for rank in awaited:
            circle = frozenset({rank} | {one for one in reach[rank] if rank in reach[one]})
            if reach[rank] <= circle:
                found.add(circle)
        return sorted(found, key=min)


def all_groups(mesh: Mapping[str, int]) -> list[AxisGroup]:
    """Every process group that beats can speak of: those of the axes, and the world."""
    world_size = prod(mesh.values())
    return [*groups(mesh, range(world_size)), AxisGroup(WORLD, tuple(range(world_size)))]


def waits(
    mesh: Mapping[str, int], beats: Mapping[int, Beat], unknown: Collection[int] = ()
) -> Waits:
    """`beats` by rank; of the ranks in `unknown` nothing is known: they may be awaited wherever
    nobody else is absent."""
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
    """Where a rank is in the common program; comparable between ranks."""
    at = PHASES.index(beat.phase) if beat.phase in PHASES else 0
    after = at >= AFTER_MICRO_BATCHES
    return beat.step, after, 0 if after else beat.micro_batch, at


def strayed(mesh: Mapping[str, int], beats: Mapping[int, Beat], seen: Waits) -> dict[int, str]:
    """The ranks that have left the common program, and by what one knows."""
    found: dict[int, str] = {}
    for rank, absent in seen.on.items():
        for other, where in absent.items():
            if other in beats and position(beats[other]) > position(beats[rank]):
                found.setdefault(other, f"is beyond {where}, which it has not entered")
    return found or _of_other_kind(beats) or _out_of_order(mesh, beats)


def _of_other_kind(beats: Mapping[int, Beat]) -> dict[int, str]:
    """In a collective of another kind than most are, or were, in as their n-th on that axis."""
    kinds: dict[tuple[str, int], dict[int, str]] = {}
    for rank, beat in beats.items():
        for one in beat.groups:
            kinds.setdefault((one.group, one.entered), {})[rank] = one.kind
    found: dict[int, str] = {}
    for (axis, number), by_rank in kinds.items():
        common = _majority(by_rank.values())
        for rank, kind in by_rank.items():
            if common is not None and kind != common:
                found[rank] = f"is in {kind} as number {number} of {axis}, others in {common}"
    return found


def _out_of_order(mesh: Mapping[str, int], beats: Mapping[int, Beat]) -> dict[int, str]:
    """Ahead of peers on one axis and behind them on another; or in one collective with others, and
    with another count on another axis than they have."""
    counts = {rank: _counts(beat) for rank, beat in beats.items()}
    alike: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in sorted(counts):
        alike.setdefault(counts[rank], []).append(rank)
    crossings: Counter[int] = Counter()
    for one, other in combinations(alike, 2):
        if _cross(dict(one), dict(other)):
            crossings.update(dict.fromkeys(alike[one], len(alike[other])))
            crossings.update(dict.fromkeys(alike[other], len(alike[one])))
    (most, times), (_, next_times) = [*crossings.most_common(2), (-1, 0), (-1, 0)][:2]
    if times > next_times:
        return {most: "is ahead of its peers on one axis and behind them on another"}
    for group in all_groups(mesh):
        there = {
            rank: counts[rank]
            for rank in group.ranks
            if rank in beats and _is_inside(beats[rank], group.axis)
        }
        common = _majority(there.values())
        if common is not None and any(one != common for one in there.values()):
            return {
                rank: f"is in {group.axis} with its peers, and has left out a collective elsewhere"
                for rank, one in there.items()
                if one != common
            }
    return {}


def _counts(beat: Beat) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((one.group, one.entered) for one in beat.groups))


def _cross(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    pairs = [(n, other.get(axis, 0)) for axis, n in one.items()]
    return any(a < b for a, b in pairs) and any(a > b for a, b in pairs)


def _is_absent(theirs: GroupBeat | None, mine: GroupBeat) -> bool:
    """Whether they are not, or not yet, in the collective that this one has entered last."""
    if theirs is None or theirs.entered < mine.entered:
        return True
    return theirs.entered == mine.entered and theirs.kind != mine.kind


def _is_inside(beat: Beat, axis: str) -> bool:
    one = _in(beat, axis)
    return one is not None and one.entered > one.left


def _in(beat: Beat, axis: str) -> GroupBeat | None:
    return next((one for one in beat.groups if one.group == axis), None)


def _majority(values: Iterable[T]) -> T | None:
    """What more than half of them are."""
    held = list(values)
    most = Counter(held).most_common(1)
    return most[0][0] if most and 2 * most[0][1] > len(held) else None


def _reach(edges: Mapping[int, Mapping[int, str]]) -> dict[int, frozenset[int]]:
    """Whom each rank waits for, directly or through others."""
    found: dict[int, frozenset[int]] = {}
    everyone = set(edges) | {other for others in edges.values() for other in others}
    for start in everyone:
        seen: set[int] = set()
        ahead = list(edges.get(start, ()))
        while ahead:
            rank = ahead.pop()
            if rank not in seen:
                seen.add(rank)
                ahead.extend(edges.get(rank, ()))
        found[start] = frozenset(seen)
    return found
