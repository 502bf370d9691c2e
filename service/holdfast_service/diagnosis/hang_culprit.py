"""Names the rank that blocks the others in a hang, from the agents' inspections of all ranks. Pure.

The verdict is `waiting` while a rank makes progress, or while the rank that the others wait for is
within the limit of its phase. Otherwise it is `hang`, and accuses the ranks that are stopped, or
that the others wait for in collectives and that wait for no other rank. If no such rank exists, it
accuses the smallest group of the mesh that covers the ranks that differ (over-eviction by stack
grouping: ByteRobust, section 5); if no rank differs, it accuses none. The only rank of a world has
no peers to compare with, so only its own limits decide, multiplied by a factor. Evidence that is
not conclusive on its own is `sure` only if two inspections agree.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import Any

from holdfast_service.diagnosis.collective_waits import diverged_ranks, find_waits
from holdfast_service.diagnosis.standstill import (
    MAX_CHARACTERS,
    all_wait_for_others,
    describe_ended,
    described_end,
    place_of,
    where_ranks_stand,
)
from holdfast_service.placement.rank_assignment import format_ranks
from holdfast_service.placement.replica_placement import coordinates
from holdfast_workers.protocol.messages import JOINING_PHASE, Beat, Inspection

STUCK_LIMIT_FACTOR = 3.0
"""A collective that all ranks have entered ends by itself unless the network is broken: it gets
this multiple of its limit."""
SINGLE_RANK_LIMIT_FACTOR = 10.0
"""Multiple of its limit that the only rank of a world gets: no other rank waits for it, so only
time distinguishes a hang from a long phase. If that was too little, the next attempt has more time,
because the limits of first steps are wider."""
MAX_SUSPECTS = 16
MAX_STACKS = 8
MAX_FRAMES = 24
MIN_SCORE = 0.3

STATES = {"T": "is stopped", "t": "is stopped", "Z": "has ended", "X": "has ended", "": "is gone"}
"""Process states in which a process cannot run at all."""


class HangFinding(StrEnum):
    WAITING = "waiting"  # no fault is visible
    HANG = "hang"


@dataclass(frozen=True)
class WorldObservation:
    """One inspection of all ranks. `silent`: rank -> the reason why it could not be inspected.
    `ended`: rank whose program has ended with exit code 0 -> the step then, 0 if not known."""

    seen: Mapping[int, Inspection]
    silent: Mapping[int, str] = field(default_factory=dict)
    ended: Mapping[int, int] = field(default_factory=dict)

    @property
    def beats(self) -> dict[int, Beat]:
        return {rank: inspection.beat for rank, inspection in self.seen.items()}


@dataclass(frozen=True)
class Suspect:
    """A rank that may block the others. `score`: strength of the evidence against it, up to 1."""

    rank: int
    score: float
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class RankStack:
    """A call stack shared by these ranks, innermost frame first."""

    ranks: tuple[int, ...]
    frames: tuple[str, ...]


@dataclass(frozen=True)
class HangVerdict:
    """A verdict. `accused`: the ranks that block the others; none in a hang if no rank differs.
    They may have ended: then the others wait for them in vain."""

    finding: HangFinding
    reason: str
    accused: tuple[int, ...] = ()
    sure: bool = True
    """False: act only if a second inspection gives the same result."""
    suspects: tuple[Suspect, ...] = ()
    stacks: tuple[RankStack, ...] = ()


def judge(
    mesh: Mapping[str, int],
    observation: WorldObservation,
    before: WorldObservation | None = None,
    *,
    overdue: bool = False,
    without_limits: bool = False,
) -> HangVerdict:
    """The verdict on a world in which some rank has made no progress for a long time.

    `before`: the previous inspection, if this is the second one. `overdue`: no step has been made
    for longer than a job may stall; then it is a hang once every rank is beyond its limit, even if
    no rank can be blamed. `without_limits`: every rank counts as beyond its limit, which says only
    how long it may neither print nor compute: a rank that waits for a device computes.
    """
    return _Case(mesh, observation, before, overdue, without_limits).verdict()


def smallest_group(mesh: Mapping[str, int], ranks: Collection[int]) -> tuple[int, ...]:
    """The smallest group of the mesh that contains all `ranks`: a single rank, ranks that differ on
    one axis, on two axes, ..., or the whole mesh."""
    if not ranks:
        return ()
    axes, first = list(mesh), min(ranks)
    places = {rank: coordinates(rank, mesh) for rank in ranks}
    differ = {i for i in range(len(axes)) if len({place[i] for place in places.values()}) > 1}
    origin = places[first]
    fixed = [i for i in range(len(axes)) if i not in differ]
    world = ((rank, coordinates(rank, mesh)) for rank in range(prod(mesh.values())))
    return tuple(rank for rank, place in world if all(place[i] == origin[i] for i in fixed))


class _Case:
    def __init__(
        self,
        mesh: Mapping[str, int],
        observation: WorldObservation,
        before: WorldObservation | None,
        overdue: bool,
        without_limits: bool,
    ) -> None:
        self._mesh = mesh
        self._observation = observation
        self._before = before
        self._overdue = overdue
        self._without_limits = without_limits
        self._beats = observation.beats
        self._waits = find_waits(mesh, self._beats, {*observation.silent, *observation.ended})
        self._cycles = self._waits.root_blockers()
        self._diverged: dict[int, str] = {}
        if any(len(cycle) > 1 for cycle in self._cycles):
            self._diverged = diverged_ranks(mesh, self._beats, self._waits)
        self._stacks = _stacks(observation.seen)

    def verdict(self) -> HangVerdict:
        stopped = [
            rank
            for rank, inspection in self._observation.seen.items()
            if inspection.process in STATES
        ]
        if stopped:
            return self._hang(stopped, sure=True)
        accused = (
            self._awaited_ranks()
            or self._ranks_not_begun()
            or self._behind_ranks()
            or self._stuck_ranks()
            or self._single_rank()
        )
        if accused:
            return self._hang(accused, sure=self._stood_still(accused))
        if self._overdue and all(self._is_late(rank) for rank in self._beats):
            if self._observation.ended and all_wait_for_others(self._observation.seen):
                return self._hang(self._observation.ended, sure=True)
            odd = self._ranks_with_other_stacks()
            group = smallest_group(self._mesh, odd)
            return self._hang(group if len(group) < len(self._observation.seen) else (), sure=True)
        return self._verdict_on(HangFinding.WAITING, (), self._why_waiting(), sure=True)

    # --- culprits -------------------------------------------------------------------------------

    def _awaited_ranks(self) -> list[int]:
        """The ranks beyond their limit that others wait for and that wait for no other rank.

        A waiting rank must be beyond its limit too: after a long phase of all ranks, some ranks
        finish a little sooner than the rest. Of ranks that wait in a circle and do not differ, none
        is accused because it entered a little sooner.
        """
        found: list[int] = []
        for cycle in self._cycles:
            if not any(self._is_late(rank) for rank in self._waiting_for(cycle)):
                continue
            suspects = self._suspects_in(cycle)
            late = [rank for rank in suspects if self._is_late(rank)]
            if len(late) == len(suspects) or self._diverged.keys() >= set(suspects):
                found.extend(late)
        return sorted(set(found))

    def _waiting_for(self, cycle: frozenset[int]) -> list[int]:
        return [rank for rank, awaited in self._waits.on.items() if not cycle.isdisjoint(awaited)]

    def _suspects_in(self, cycle: frozenset[int]) -> Collection[int]:
        """The culprits among ranks that wait in a cycle: ranks that have diverged from the common
        program, else ranks that are not asleep, as a waiting rank would be."""
        if len(cycle) == 1:
            return cycle
        diverged = [rank for rank in cycle if rank in self._diverged]
        awake = [rank for rank in cycle if self._is_awake(rank)]
        few = awake if 2 * len(awake) < len(cycle) + 1 else []
        return diverged or few or smallest_group(self._mesh, cycle)

    def _is_awake(self, rank: int) -> bool:
        inspection = self._observation.seen.get(rank)
        if inspection is None:
            return True
        return inspection.process in ("R", "D") or bool(inspection.problem)

    def _ranks_not_begun(self) -> list[int]:
        """The ranks that should long have begun to carry out their order: they wait for no rank,
        while the others may wait for them in the rendezvous."""
        joining = (rank for rank, beat in self._beats.items() if beat.phase == JOINING_PHASE)
        return [rank for rank in joining if self._is_late(rank)]

    def _behind_ranks(self) -> list[int]:
        """The ranks behind all others, if they are a minority. Used without data on collectives."""
        if any(beat.groups for beat in self._beats.values()) or len(self._beats) < 2:
            return []
        places = {rank: (beat.step, beat.phase) for rank, beat in self._beats.items()}
        earliest = min(step for step, _ in places.values())
        behind = [rank for rank, (step, _) in places.items() if step == earliest]
        few = 2 * len(behind) < len(places)
        return [rank for rank in behind if few and self._is_late(rank)]

    def _stuck_ranks(self) -> list[int]:
        """Ranks that have long been in a collective that all members have entered, while no rank is
        awaited: the network between them does not deliver."""
        stuck = self._waits.stuck
        if not stuck or self._cycles or not all(self._is_late(rank) for rank in self._beats):
            return []
        if any(beat.age_s < STUCK_LIMIT_FACTOR * beat.limit_s for beat in self._beats.values()):
            return []
        odd = [rank for rank in self._ranks_with_other_stacks() if rank in stuck]
        return list(smallest_group(self._mesh, odd or stuck))

    def _single_rank(self) -> list[int]:
        """The only rank of its world, if it is far beyond its limit."""
        if prod(self._mesh.values()) > 1:
            return []
        factor = 1.0 if self._overdue else SINGLE_RANK_LIMIT_FACTOR
        late = (rank for rank, beat in self._beats.items() if beat.age_s > factor * beat.limit_s)
        return list(late)

    def _is_late(self, rank: int) -> bool:
        """Whether the rank is beyond its limit. A rank without an inspection counts as late."""
        beat = self._beats.get(rank)
        return beat is None or self._without_limits or beat.age_s > beat.limit_s

    def _stood_still(self, accused: Collection[int]) -> bool:
        return self._before is not None and not any(self._has_moved(rank) for rank in accused)

    def _has_moved(self, rank: int) -> bool:
        if self._before is None:
            return False
        then, now = self._before.seen.get(rank), self._observation.seen.get(rank)
        if then is None or now is None:
            return (then is None) != (now is None)
        return _progress_mark(then.beat) != _progress_mark(now.beat)

    def _ranks_with_other_stacks(self) -> list[int]:
        """The ranks whose stack differs from that of most ranks."""
        most = max(self._stacks.values(), key=len, default=[])
        if 2 * len(most) <= len(self._observation.seen):
            return []
        return [rank for rank in self._observation.seen if rank not in most]

    # --- text -----------------------------------------------------------------------------------

    def _hang(self, blamed: Collection[int], *, sure: bool) -> HangVerdict:
        looked_at = {*self._observation.seen, *self._observation.silent, *self._observation.ended}
        accused = looked_at.intersection(blamed)  # a whole group may hold ranks that are done
        moved = [rank for rank in sorted(accused) if self._has_moved(rank)]
        if moved:
            reason = (
                f"{format_ranks(moved)} made progress between two inspections: slow, but not a hang"
            )
            return self._verdict_on(HangFinding.WAITING, (), reason, sure=True)
        named = tuple(sorted(accused))
        if accused == looked_at and len(named) > 1:
            named = ()
        return self._verdict_on(HangFinding.HANG, named, self._why_hanging(named), sure=sure)

    def _verdict_on(
        self, finding: HangFinding, accused: tuple[int, ...], reason: str, *, sure: bool
    ) -> HangVerdict:
        return HangVerdict(
            finding=finding,
            reason=reason,
            accused=accused,
            sure=sure,
            suspects=self._suspects(accused),
            stacks=_shown_stacks(self._observation.seen, self._stacks),
        )

    def _why_hanging(self, accused: tuple[int, ...]) -> str:
        ended = self._observation.ended
        if not accused:
            left = f"; {describe_ended(ended)}" if ended else ""
            return f"{self._why_nobody()}{left}"
        if len(accused) > 4:
            return f"{format_ranks(accused)}: {self._standing(accused[0])}"
        if all(rank in ended for rank in accused):
            gone = {rank: step for rank, step in ended.items() if rank in accused}
            return f"{describe_ended(gone)} while {where_ranks_stand(self._observation.seen)}"
        return "; ".join(f"rank {rank} {self._standing(rank)}" for rank in accused)

    def _why_nobody(self) -> str:
        """The reason of a hang in which no rank is accused."""
        places = {place_of(inspection) for inspection in self._observation.seen.values()}
        if len(places) == 1 and not self._observation.ended:
            return "no rank makes progress, and no rank stands out"
        return f"no rank makes progress: {where_ranks_stand(self._observation.seen)}"

    def _why_waiting(self) -> str:
        awaited = sorted({rank for cycle in self._cycles for rank in cycle})
        if not awaited:
            phases = sorted({beat.phase for beat in self._beats.values()})
            return f"no rank waits for an absent rank: all are in {' or '.join(phases)}"
        rank = awaited[0]
        return (
            f"the others wait for {format_ranks(awaited)}, within its limit: {self._standing(rank)}"
        )

    def _standing(self, rank: int) -> str:
        """The observations of a rank, in one line."""
        if rank in self._observation.ended:
            return described_end(self._observation.ended[rank])
        if rank not in self._observation.seen:
            return f"could not be inspected: {self._observation.silent.get(rank, 'unknown')}"
        inspection = self._observation.seen[rank]
        beat = inspection.beat
        parts = [STATES[inspection.process]] if inspection.process in STATES else []
        parts.append(
            f"has been in {beat.phase} of step {beat.step} for {beat.age_s:.2f} s "
            f"(limit {beat.limit_s:.2f} s)"
        )
        if inspection.stack:
            parts.append(f"at {inspection.stack[0][:MAX_CHARACTERS]}")
        awaited_in = sorted({where[rank] for where in self._waits.on.values() if rank in where})
        if awaited_in:
            parts.append(f"awaited in {', '.join(awaited_in[:3])}")
        if rank in self._diverged:
            parts.append(self._diverged[rank])
        return ", ".join(parts)

    # --- scores ---------------------------------------------------------------------------------

    def _suspects(self, accused: tuple[int, ...]) -> tuple[Suspect, ...]:
        odd = set(self._ranks_with_other_stacks())
        found: list[Suspect] = []
        everybody = {*self._observation.seen, *self._observation.silent, *accused}
        for rank in sorted(everybody):
            evidence = self._evidence(rank, odd)
            if rank in accused and not evidence:
                evidence = [(0.1, "in the smallest group that holds ranks that wait in a circle")]
            doubt = 1.0
            for weight, _ in evidence:
                doubt *= 1.0 - weight
            score = round(1.0 - doubt, 3)
            if rank in accused or score >= MIN_SCORE:
                found.append(Suspect(rank, score, tuple(reason for _, reason in evidence)))
        found.sort(key=lambda suspect: (suspect.rank not in accused, -suspect.score, suspect.rank))
        return tuple(found[:MAX_SUSPECTS])

    def _evidence(self, rank: int, odd: Collection[int]) -> list[tuple[float, str]]:
        """(weight, reason) of all evidence against a rank."""
        found: list[tuple[float, str]] = []
        blocked = [other for other, absent in self._waits.on.items() if rank in absent]
        if any(rank in cycle for cycle in self._cycles):
            found.append((0.6, f"{format_ranks(sorted(blocked))} wait for it"))
        if rank in self._diverged:
            found.append((0.6, self._diverged[rank]))
        inspection = self._observation.seen.get(rank)
        if rank in self._observation.ended:
            return [*found, (0.6, "its program has ended with exit code 0")]
        if inspection is None:
            return [*found, (0.6, self._observation.silent.get(rank, "its state is not known"))]
        if inspection.process in STATES:
            found.append((0.95, f"its process {STATES[inspection.process]}"))
        if inspection.process == "D":
            found.append((0.3, "sleeps uninterruptibly: it waits for a device or a file system"))
        if inspection.problem:
            found.append(
                (0.3, f"its stack cannot be sampled: {inspection.problem[:MAX_CHARACTERS]}")
            )
        if self._is_late(rank) and rank not in self._waits.on:
            found.append((0.3, f"in {inspection.beat.phase} for longer than its limit"))
        if rank in self._waits.stuck and not self._cycles:
            axis = self._waits.stuck[rank].axis
            found.append((0.3, f"in a collective of {axis} that all members have entered"))
        if rank in odd:
            found.append((0.1, "its stack differs from that of most ranks"))
        return found


def _progress_mark(beat: Beat) -> tuple[Any, ...]:
    """A value that changes when the rank makes progress."""
    counts = tuple((group.group, group.entered, group.left) for group in beat.groups)
    return beat.worker, beat.step, beat.phase, beat.micro_batch, counts


def _stacks(seen: Mapping[int, Inspection]) -> dict[tuple[str, ...], list[int]]:
    """Stack without line numbers -> the ranks with that stack."""
    found: dict[tuple[str, ...], list[int]] = {}
    for rank, inspection in sorted(seen.items()):
        frames = tuple(re.sub(r":\d+\)$", ")", frame) for frame in inspection.stack)
        found.setdefault(frames or ("?", inspection.problem), []).append(rank)
    return found


def _shown_stacks(
    seen: Mapping[int, Inspection], stacks: Mapping[tuple[str, ...], list[int]]
) -> tuple[RankStack, ...]:
    """One stack for each set of ranks with the same stack; rare stacks first: they say most."""
    shown = [
        RankStack(tuple(ranks), tuple(frame[:MAX_CHARACTERS] for frame in frames[:MAX_FRAMES]))
        for ranks in sorted(stacks.values(), key=len)
        if (frames := seen[ranks[0]].stack or (f"no stack: {seen[ranks[0]].problem}",))
    ]
    return tuple(shown[:MAX_STACKS])
