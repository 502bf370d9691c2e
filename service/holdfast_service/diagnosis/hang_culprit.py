"""Which rank holds up the others, from what agents see of every rank. Pure.

The verdict is `waiting` as long as somebody moves, or whoever the others wait for is within the
limit of its phase. Else it is `hang`: with the ranks that are stopped, or that the others wait for
in their collectives and that wait for nobody; where no rank can be named, with the smallest group
of the mesh that covers those that differ (over-eviction by stack grouping: ByteRobust, section 5);
where nothing differs, with nobody. The only rank of a world has no peers to be judged by: its own
limits say, with more patience. Evidence that is not plain in itself is `sure` only once two
looks agree.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import Any

from holdfast_service.diagnosis.collective_waits import strayed, waits
from holdfast_service.placement.rank_assignment import format_ranks
from holdfast_service.placement.replica_placement import coordinates
from holdfast_workers.protocol.messages import Beat, Inspection

STUCK_PATIENCE = 3.0
"""A collective that all have entered ends by itself unless the network is at fault: it is given so
many times its limit."""
ALONE_PATIENCE = 10.0
"""Nobody waits for the only rank of a world, so nothing but time tells a hang from a long phase: it
is given so many times its limit. Where that was too little, its next attempt has more: the limits
of first steps are wider."""
MOST_SUSPECTS = 16
MOST_STACKS = 8
MOST_FRAMES = 24
MOST_CHARACTERS = 200
LEAST_SCORE = 0.3

STATES = {"T": "is stopped", "t": "is stopped", "Z": "has ended", "X": "has ended", "": "is gone"}
"""States of a process in which it can do nothing, whatever it was at."""


class Finding(StrEnum):
    WAITING = "waiting"  # nothing is wrong, as far as can be seen
    HANG = "hang"


@dataclass(frozen=True)
class Look:
    """What was seen of the ranks at one time. `silent`: why nothing was seen of these."""

    seen: Mapping[int, Inspection]
    silent: Mapping[int, str] = field(default_factory=dict)

    @property
    def beats(self) -> dict[int, Beat]:
        return {rank: one.beat for rank, one in self.seen.items()}


@dataclass(frozen=True)
class Suspect:
    """A rank that may hold up the others. `score`: how much speaks against it, up to 1."""

    rank: int
    score: float
    reasons: tuple[str, ...]

    def data(self) -> dict[str, Any]:
        return {"rank": self.rank, "score": self.score, "reasons": list(self.reasons)}


@dataclass(frozen=True)
class Stack:
    """Where these ranks stand alike, innermost first."""

    ranks: tuple[int, ...]
    frames: tuple[str, ...]

    def data(self) -> dict[str, Any]:
        return {"ranks": list(self.ranks), "frames": list(self.frames)}


@dataclass(frozen=True)
class Verdict:
    """`accused`: the ranks that hold up the others; none in a hang in which nobody differs."""

    finding: Finding
    reason: str
    accused: tuple[int, ...] = ()
    sure: bool = True
    """False: a second look must show the same before anybody acts."""
    suspects: tuple[Suspect, ...] = ()
    stacks: tuple[Stack, ...] = ()

    def data(self) -> dict[str, Any]:
        return {
            "finding": self.finding.value,
            "reason": self.reason,
            "accused": list(self.accused),
            "suspects": [one.data() for one in self.suspects],
            "stacks": [one.data() for one in self.stacks],
        }


def judge(
    mesh: Mapping[str, int], look: Look, before: Look | None = None, *, overdue: bool = False
) -> Verdict:
    """The verdict on a world in which some rank has made no progress for long.

    `before` is what was seen a moment ago, if this is the second look. `overdue`: no step has been
    made for longer than a job may stand still: once everybody stands beyond his limit it is a hang,
    whoever is to blame for it.
    """
    return _Case(mesh, look, before, overdue).verdict()


def cover(mesh: Mapping[str, int], ranks: Collection[int]) -> tuple[int, ...]:
    """The smallest group of the mesh that has all of `ranks`: one, those that differ on one axis,
    on two, ...; in the end all."""
    if not ranks:
        return ()
    axes, first = list(mesh), min(ranks)
    places = {rank: coordinates(rank, mesh) for rank in ranks}
    differ = {i for i in range(len(axes)) if len({place[i] for place in places.values()}) > 1}
    here = places[first]
    fixed = [i for i in range(len(axes)) if i not in differ]
    everyone = ((rank, coordinates(rank, mesh)) for rank in range(prod(mesh.values())))
    return tuple(rank for rank, at in everyone if all(at[i] == here[i] for i in fixed))


class _Case:
    def __init__(
        self, mesh: Mapping[str, int], look: Look, before: Look | None, overdue: bool
    ) -> None:
        self._mesh = mesh
        self._look = look
        self._before = before
        self._overdue = overdue
        self._beats = look.beats
        self._waits = waits(mesh, self._beats, look.silent)
        self._circles = self._waits.last_in_line()
        self._strayed: dict[int, str] = {}
        if any(len(circle) > 1 for circle in self._circles):
            self._strayed = strayed(mesh, self._beats, self._waits)
        self._stacks = _stacks(look.seen)

    def verdict(self) -> Verdict:
        helpless = [rank for rank, one in self._look.seen.items() if one.process in STATES]
        if helpless:
            return self._hang(helpless, sure=True)
        accused = (
            self._who_is_awaited()
            or self._who_is_behind()
            or self._who_is_stuck()
            or self._who_is_alone()
        )
        if accused:
            return self._hang(accused, sure=self._stood_still(accused))
        if self._overdue and all(self._is_late(rank) for rank in self._beats):
            odd = self._odd()
            group = cover(self._mesh, odd)
            return self._hang(group if len(group) < len(self._look.seen) else (), sure=True)
        return self._told(Finding.WAITING, (), self._why_waiting(), sure=True)

    # --- who it is ------------------------------------------------------------------------------

    def _who_is_awaited(self) -> list[int]:
        """Of those that others wait for and that wait for nobody else, those beyond their limit.

        The others must have waited for longer than theirs: after a long phase of all ranks, some
        are through a little sooner than the rest.
        """
        found: list[int] = []
        for circle in self._circles:
            if any(self._is_late(rank) for rank in self._waiting_for(circle)):
                found.extend(rank for rank in self._named_of(circle) if self._is_late(rank))
        return sorted(set(found))

    def _waiting_for(self, circle: frozenset[int]) -> list[int]:
        return [rank for rank, awaited in self._waits.on.items() if not circle.isdisjoint(awaited)]

    def _named_of(self, circle: frozenset[int]) -> Collection[int]:
        """Who of some that wait in a circle does not belong there: who has left the common program,
        else who does not sleep as one does who waits."""
        if len(circle) == 1:
            return circle
        strayed = [rank for rank in circle if rank in self._strayed]
        awake = [rank for rank in circle if self._is_awake(rank)]
        few = awake if 2 * len(awake) < len(circle) + 1 else []
        return strayed or few or cover(self._mesh, circle)

    def _is_awake(self, rank: int) -> bool:
        one = self._look.seen.get(rank)
        return one is None or one.process in ("R", "D") or bool(one.problem)

    def _who_is_behind(self) -> list[int]:
        """Where nothing is known of collectives: the few that are behind all others."""
        if any(beat.groups for beat in self._beats.values()) or len(self._beats) < 2:
            return []
        places = {rank: (beat.step, beat.phase) for rank, beat in self._beats.items()}
        earliest = min(step for step, _ in places.values())
        behind = [rank for rank, (step, _) in places.items() if step == earliest]
        few = 2 * len(behind) < len(places)
        return [rank for rank in behind if few and self._is_late(rank)]

    def _who_is_stuck(self) -> list[int]:
        """In a collective that all its members have entered, for very long, while nobody is
        awaited: the network between them does not deliver."""
        stuck = self._waits.stuck
        if not stuck or self._circles or not all(self._is_late(rank) for rank in self._beats):
            return []
        if any(beat.age_s < STUCK_PATIENCE * beat.limit_s for beat in self._beats.values()):
            return []
        odd = [rank for rank in self._odd() if rank in stuck]
        return list(cover(self._mesh, odd or stuck))

    def _who_is_alone(self) -> list[int]:
        """The only rank of its world, once it has stood for very long."""
        if prod(self._mesh.values()) > 1:
            return []
        patience = 1.0 if self._overdue else ALONE_PATIENCE
        late = (rank for rank, one in self._beats.items() if one.age_s > patience * one.limit_s)
        return list(late)

    def _is_late(self, rank: int) -> bool:
        """A rank of which nothing is seen has no excuse."""
        beat = self._beats.get(rank)
        return beat is None or beat.age_s > beat.limit_s

    def _stood_still(self, accused: Collection[int]) -> bool:
        return self._before is not None and not any(self._has_moved(rank) for rank in accused)

    def _has_moved(self, rank: int) -> bool:
        if self._before is None:
            return False
        then, now = self._before.seen.get(rank), self._look.seen.get(rank)
        if then is None or now is None:
            return (then is None) != (now is None)
        return _mark(then.beat) != _mark(now.beat)

    def _odd(self) -> list[int]:
        """The ranks that stand elsewhere than most do."""
        most = max(self._stacks.values(), key=len, default=[])
        if 2 * len(most) <= len(self._look.seen):
            return []
        return [rank for rank in self._look.seen if rank not in most]

    # --- in words -------------------------------------------------------------------------------

    def _hang(self, accused: Collection[int], *, sure: bool) -> Verdict:
        moved = [rank for rank in accused if self._has_moved(rank)]
        if moved:
            reason = f"{format_ranks(moved)} moved on between two looks: slow, and no hang"
            return self._told(Finding.WAITING, (), reason, sure=True)
        named = tuple(sorted(accused))
        if len(named) == len(self._look.seen) + len(self._look.silent) and len(named) > 1:
            named = ()
        return self._told(Finding.HANG, named, self._why_hanging(named), sure=sure)

    def _told(
        self, finding: Finding, accused: tuple[int, ...], reason: str, *, sure: bool
    ) -> Verdict:
        return Verdict(
            finding=finding,
            reason=reason,
            accused=accused,
            sure=sure,
            suspects=self._suspects(accused),
            stacks=_told_stacks(self._look.seen, self._stacks),
        )

    def _why_hanging(self, accused: tuple[int, ...]) -> str:
        if not accused:
            return "nobody moves, and no rank stands out"
        if len(accused) > 4:
            return f"{format_ranks(accused)}: {self._standing(accused[0])}"
        return "; ".join(f"rank {rank} {self._standing(rank)}" for rank in accused)

    def _why_waiting(self) -> str:
        awaited = sorted({rank for circle in self._circles for rank in circle})
        if not awaited:
            phases = sorted({beat.phase for beat in self._beats.values()})
            return f"no rank waits for one that is absent: all are in {' or '.join(phases)}"
        rank = awaited[0]
        return f"the others wait for {format_ranks(awaited)}, within its limit: {self._standing(rank)}"

    def _standing(self, rank: int) -> str:
        """What is seen of a rank, in one line."""
        if rank not in self._look.seen:
            return f"cannot be seen: {self._look.silent.get(rank, 'unknown')}"
        one = self._look.seen[rank]
        beat = one.beat
        words = [STATES.get(one.process, "")] if one.process in STATES else []
        words.append(
            f"has stood in {beat.phase} of step {beat.step} for {beat.age_s:.2f} s "
            f"(limit {beat.limit_s:.2f} s)"
        )
        if one.stack:
            words.append(f"at {one.stack[0][:MOST_CHARACTERS]}")
        awaited_in = sorted({where[rank] for where in self._waits.on.values() if rank in where})
        if awaited_in:
            words.append(f"awaited in {', '.join(awaited_in[:3])}")
        return ", ".join(words)

    # --- scores ---------------------------------------------------------------------------------

    def _suspects(self, accused: tuple[int, ...]) -> tuple[Suspect, ...]:
        odd = set(self._odd())
        found: list[Suspect] = []
        for rank in sorted({*self._look.seen, *self._look.silent}):
            weighed = self._evidence(rank, odd)
            doubt = 1.0
            for weight, _ in weighed:
                doubt *= 1.0 - weight
            score = round(1.0 - doubt, 3)
            if rank in accused or score >= LEAST_SCORE:
                found.append(Suspect(rank, score, tuple(why for _, why in weighed)))
        found.sort(key=lambda one: (one.rank not in accused, -one.score, one.rank))
        return tuple(found[:MOST_SUSPECTS])

    def _evidence(self, rank: int, odd: Collection[int]) -> list[tuple[float, str]]:
        """(weight, words) of all that speaks against a rank."""
        found: list[tuple[float, str]] = []
        held_up = [other for other, absent in self._waits.on.items() if rank in absent]
        if any(rank in circle for circle in self._circles):
            found.append((0.6, f"{format_ranks(sorted(held_up))} wait for it"))
        if rank in self._strayed:
            found.append((0.6, self._strayed[rank]))
        one = self._look.seen.get(rank)
        if one is None:
            return [*found, (0.6, self._look.silent[rank])]
        if one.process in STATES:
            found.append((0.95, f"its process {STATES[one.process]}"))
        if one.process == "D":
            found.append((0.3, "sleeps uninterruptibly: it waits for a device or a file system"))
        if one.problem:
            found.append((0.3, f"cannot be sampled: {one.problem[:MOST_CHARACTERS]}"))
        if self._is_late(rank) and rank not in self._waits.on:
            found.append((0.3, f"in {one.beat.phase} for longer than its limit"))
        if rank in self._waits.stuck and not self._circles:
            axis = self._waits.stuck[rank].axis
            found.append((0.3, f"in a collective of {axis} that all have entered"))
        if rank in odd:
            found.append((0.1, "stands elsewhere than most ranks"))
        return found


def _mark(beat: Beat) -> tuple[Any, ...]:
    """What changes when a rank moves."""
    counts = tuple((one.group, one.entered, one.left) for one in beat.groups)
    return beat.worker, beat.step, beat.phase, beat.micro_batch, counts


def _stacks(seen: Mapping[int, Inspection]) -> dict[tuple[str, ...], list[int]]:
    """The ranks by where they stand, but for line numbers, and for which peer they talk to."""
    found: dict[tuple[str, ...], list[int]] = {}
    for rank, one in sorted(seen.items()):
        like = tuple(re.sub(r":\d+\)$", ")", frame) for frame in one.stack)
        found.setdefault(like or ("?", one.problem), []).append(rank)
    return found


def _told_stacks(
    seen: Mapping[int, Inspection], stacks: Mapping[tuple[str, ...], list[int]]
) -> tuple[Stack, ...]:
    """The stack of the first of those that stand alike; the rarest first, for they tell most."""
    told = [
        Stack(tuple(ranks), tuple(one[:MOST_CHARACTERS] for one in frames[:MOST_FRAMES]))
        for ranks in sorted(stacks.values(), key=len)
        if (frames := seen[ranks[0]].stack or (f"no stack: {seen[ranks[0]].problem}",))
    ]
    return tuple(told[:MOST_STACKS])
