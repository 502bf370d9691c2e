"""Payloads of one step in this node's shared memory: found, distinguished by save, verified, read.

A step may have been saved more than once, and a rank may have parts of several of these saves: the
ranks agree on one of them before they read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast_workers.errors import WorkersError
from holdfast_workers.memory.segment import BadSegment, Commit, Segment
from holdfast_workers.program_memory.payload import PayloadIndex, payload_facts, read_index
from holdfast_workers.program_memory.payload_exchange import StateMissing
from holdfast_workers.program_memory.world_saves import WorldSave

_SEGMENT_FILE = re.compile(r"(?:own|replica)-(\d+)\.seg")


class PayloadDamaged(WorkersError):
    """A memory checkpoint does not have its digest."""


@dataclass
class _AtHand:
    """A payload in this node's shared memory."""

    segment: Segment
    commit: Commit
    verified: bool = False


class Payloads:
    """The payloads of one step that this rank can read without others, by the rank that saved
    them."""

    def __init__(self, found: Mapping[int, Mapping[WorldSave, _AtHand]], own_rank: int) -> None:
        self._found = found
        self._own_rank = own_rank

    @property
    def owners(self) -> list[int]:
        return sorted(self._found)

    @property
    def saves(self) -> dict[int, frozenset[WorldSave]]:
        """The saves of which each owner's payload is at hand."""
        return {owner: frozenset(by_save) for owner, by_save in self._found.items()}

    def of(self, save: WorldSave | None) -> Payloads:
        """The payloads of `save` alone."""
        return Payloads(
            {
                owner: {save: by_save[save]}
                for owner, by_save in self._found.items()
                if save is not None and save in by_save
            },
            self._own_rank,
        )

    def view(self, owner: int) -> memoryview:
        """The bytes, verified at the first call; of several saves, of the newest. Raises
        StateMissing, PayloadDamaged."""
        if owner not in self._found:
            raise StateMissing(f"the memory checkpoint of rank {owner} is not on this node")
        at_hand = self._found[owner][max(self._found[owner])]
        segment, commit = at_hand.segment, at_hand.commit
        if not at_hand.verified:
            if not segment.verify(commit):
                if segment.writable and segment.is_current(commit):
                    segment.quarantine(commit)
                raise PayloadDamaged(
                    f"step {commit.step} of rank {owner} in memory does not match its digest: "
                    "it must not be loaded"
                )
            at_hand.verified = True
        return segment.slot(commit)

    def index(self, owner: int) -> PayloadIndex:
        """Raises StateMissing, PayloadDamaged, BadPayload."""
        return read_index(self.view(owner))

    def any_index(self) -> PayloadIndex | None:
        """The index of this rank's own payload, or else of another at hand; None: there is none."""
        order = sorted(self._found, key=lambda owner: (owner != self._own_rank, owner))
        return self.index(order[0]) if order else None

    def are_current(self) -> bool:
        """Whether there are any, none of which has been overwritten."""
        return bool(self._found) and all(
            each.segment.is_current(each.commit) for each in self._all()
        )

    def check_current(self) -> None:
        """Raises StateMissing if a payload that was read has been overwritten meanwhile."""
        for each in self._all():
            if each.verified and not each.segment.is_current(each.commit):
                raise StateMissing(
                    f"step {each.commit.step} in {each.segment.path.name} was overwritten while it "
                    "was read: load another checkpoint"
                )

    def _all(self) -> Iterable[_AtHand]:
        return (each for by_save in self._found.values() for each in by_save.values())


def find_payloads(
    root: Path, own_rank: int, own: Segment | None, wanted: Callable[[WorldSave], bool]
) -> Payloads:
    """The payloads of the saves that are `wanted`: in this rank's `own` segment, and in all others
    below `root`, also of other worlds."""
    found: dict[int, dict[WorldSave, _AtHand]] = {}
    if own is not None:
        found[own_rank] = _wanted(own, wanted)
    for path in sorted(root.glob("*/*.seg")):
        name = _SEGMENT_FILE.fullmatch(path.name)
        if name and (int(name[1]) != own_rank or own is None or path != own.path):
            _add(found.setdefault(int(name[1]), {}), path, wanted)
    return Payloads({owner: saves for owner, saves in found.items() if saves}, own_rank)


def save_of(segment: Segment, commit: Commit) -> WorldSave:
    """The save that a commit is part of. It is not verified: a damaged payload is found when it is
    loaded."""
    number, _ = payload_facts(segment.layout, segment.slot(commit))
    return WorldSave(commit.attempt, number, commit.step)


def _add(found: dict[WorldSave, _AtHand], path: Path, wanted: Callable[[WorldSave], bool]) -> None:
    try:
        segment = Segment.open(path, writable=False)
    except (FileNotFoundError, BadSegment):
        return  # replaced or removed meanwhile; damage is reported by its own agent
    saves = _wanted(segment, wanted)
    if saves.keys() <= found.keys():
        segment.close()
    found.update({save: each for save, each in saves.items() if save not in found})


def _wanted(segment: Segment, wanted: Callable[[WorldSave], bool]) -> dict[WorldSave, _AtHand]:
    saves = {save_of(segment, commit): commit for commit in reversed(segment.commits())}
    return {save: _AtHand(segment, commit) for save, commit in saves.items() if wanted(save)}
