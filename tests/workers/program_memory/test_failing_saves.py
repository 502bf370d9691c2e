"""Random histories of a program that saves, on worlds of one size after another: whatever fails,
every load has one step on all ranks, the newest that was whole, with the bytes that were saved."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.programs.simulated_worlds import (
    Died,
    Fault,
    SimulatedWorld,
    simulated_world,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from holdfast_workers.memory.segment import Segment
from holdfast_workers.program_memory.found_payloads import PayloadDamaged
from holdfast_workers.program_memory.payload import TRAILER_BYTES
from holdfast_workers.program_memory.world_saves import WorldSave

KINDS = ("dcp", "object", "folder")


@dataclass(frozen=True)
class Save:
    """All ranks save. `again`: the step that was saved last."""

    kind: str
    numels: tuple[int, ...]
    """Of each rank's state."""
    faults: Mapping[int, Fault]
    pushed: frozenset[int]
    """The ranks whose partners get their copies afterwards."""
    again: bool


@dataclass(frozen=True)
class GoBack:
    """The program loads the step before the newest, if all ranks have it."""


@dataclass(frozen=True)
class Restart:
    """All processes end. `lost`: a node that is lost. `size`: the number of ranks of the next
    attempt; None: as before. `loads`: whether the program loads."""

    lost: int | None
    size: int | None
    loads: bool


MOST_RANKS = 4
RANKS = st.integers(0, MOST_RANKS - 1)
SIZES = st.integers(1, MOST_RANKS)
POINTS = st.sampled_from(["begin", "begun", "commit", "committed"])
FAILURES = st.dictionaries(RANKS, st.builds(Fault, POINTS, st.just(False)), min_size=1, max_size=2)
DEATHS = st.dictionaries(RANKS, st.builds(Fault, POINTS, st.just(True)), min_size=1, max_size=2)
NO_FAULT: dict[int, Fault] = {}
ALL = frozenset(range(MOST_RANKS))
SAVES = st.builds(
    Save,
    kind=st.sampled_from(KINDS),
    numels=st.tuples(*[st.sampled_from([8, 8, 8, 3000])] * MOST_RANKS),
    faults=st.integers(0, 7).flatmap(
        lambda case: DEATHS if case == 0 else FAILURES if case < 4 else st.just(NO_FAULT)
    ),
    pushed=st.integers(0, 2).flatmap(lambda case: st.just(ALL) if case else st.frozensets(RANKS)),
    again=st.integers(0, 5).map(lambda case: case == 0),
)
RESTARTS = st.builds(
    Restart,
    lost=st.integers(0, 3).flatmap(lambda case: RANKS if case else st.none()),
    size=st.integers(0, 1).flatmap(lambda case: SIZES if case else st.none()),
    loads=st.integers(0, 3).map(lambda case: case > 0),
)
EVENTS = st.integers(0, 9).flatmap(
    lambda case: RESTARTS if case < 2 else st.just(GoBack()) if case == 2 else SAVES
)
HISTORIES = st.lists(EVENTS, min_size=4, max_size=12)


def saved(fails_on: int | None = None) -> Save:
    """An object, pushed to all partners; one rank may have no room for it."""
    faults = {} if fails_on is None else {fails_on: Fault("begin", dies=False)}
    return Save("object", (8,) * MOST_RANKS, faults, ALL, again=False)


@pytest.mark.seconds
@settings(max_examples=50)
@example(2, [saved(), saved(), saved(1), saved(1)], Restart(lost=None, size=None, loads=True))
@example(2, [saved(), saved(1), saved(1)], Restart(lost=0, size=None, loads=True))
@example(2, [saved(), saved(), Restart(None, 3, True), saved()], Restart(None, None, True))
@given(size=SIZES, history=HISTORIES, end=RESTARTS)
def test_every_load_has_the_newest_step_that_was_whole(
    size: int, history: list[Save | GoBack | Restart], end: Restart
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="holdfast-saves-", dir="/dev/shm"))
    try:
        with simulated_world(folder) as world:
            Checked(world).play(size, [*history, end])
    finally:
        shutil.rmtree(folder)


def test_a_start_with_a_damaged_index_is_refused(tmp_path: Path) -> None:
    with simulated_world(tmp_path) as world:
        Checked(world).play(2, [saved(), Restart(lost=None, size=None, loads=False)])
        world.start_attempt(2)
        with Segment.open(tmp_path / "node-0" / "dp_shard=2" / "own-0.seg") as segment:
            for commit in segment.commits():
                segment._slot(commit.slot)[-TRAILER_BYTES] ^= 1
        damaged, whole = world.run(lambda rank: world.tiers[rank].newest())
        assert isinstance(damaged, PayloadDamaged)
        assert whole == 10


class Checked:
    """Plays a history, and compares what the ranks load with what they saved."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world
        self._step = 0
        self._count = 0
        self._saved: dict[WorldSave, tuple[Save, int, int]] = {}
        """With a number that is part of its content, and the number of its ranks."""
        self._newest: WorldSave | None = None
        """The newest that was whole, or the one that the program loaded after that."""
        self._abandoned: set[WorldSave] = set()
        """By a program that went back."""
        self._protected: WorldSave | None = None
        """The newest that was whole on all ranks and at all partners."""

    def play(self, size: int, history: list[Save | GoBack | Restart]) -> None:
        self._world.start_attempt(size)
        for event in history:
            match event:
                case Save():
                    self._save(event)
                case GoBack():
                    self._go_back()
                case Restart(lost=lost, size=new_size, loads=loads):
                    self._restart(lost, new_size, loads=loads)
            self._note_protected()

    def _save(self, save: Save) -> None:
        world = self._world
        self._step += 0 if save.again and self._step else 10
        self._count += 1
        faults = {rank: fault for rank, fault in save.faults.items() if rank < world.size}
        world.faults = faults
        before = set(world.committed)
        results = world.run(lambda rank: self._save_on(rank, save))
        world.faults = {}
        for found in set(world.committed) - before:
            self._saved[found] = save, self._count, world.size
            if len(world.committed[found]) == world.size:
                self._newest = found
                self._abandoned.clear()
        for rank in save.pushed:
            if rank < world.size:
                world.push(rank)
        if any(isinstance(result, Died) for result in results):
            self._restart(None, None, loads=True)
        else:
            self._check_newest()
            world.free_others()

    def _save_on(self, rank: int, save: Save) -> Any:
        tier, step = self._world.tiers[rank], self._step
        state = _state(rank, self._count, save.numels[rank])
        if save.kind == "dcp":
            return _save_state_dict(state, tier.at(step), no_dist=False)
        if save.kind == "object":
            return tier.save(step, state)
        folder = self._world.folder / f"files-{rank}"
        folder.mkdir(exist_ok=True)
        (folder / f"rank-{rank}").write_bytes(_content(state))
        return tier.save_folder(step, folder)

    def _check_newest(self) -> None:
        newest = self._world.run(lambda rank: self._world.tiers[rank].newest())
        assert newest == [_step(self._newest)] * self._world.size

    def _restart(self, lost: int | None, size: int | None, *, loads: bool) -> None:
        world = self._world
        if lost is not None:
            world.lose_node(lost)
        world.start_attempt(size or world.size)
        self._check_restore(lost)
        self._step = _step(self._newest) or 0
        if loads and self._newest is not None:
            self._load(self._newest)
        self._check_newest()

    def _check_restore(self, lost: int | None) -> None:
        """The attempt starts from the newest whole save that its ranks can load; after the loss of
        a node, from that which the partners protected, or from a newer one."""
        found = self._world.restored
        if found is not None:
            _, _, size = self._saved[found]
            assert len(self._world.committed[found]) == size
            assert self._fits(found)
        if lost is None and self._newest is not None and self._fits(self._newest):
            assert found == self._newest or found in self._abandoned
        elif lost is None and found is not None:
            assert self._newest is not None
            assert found < self._newest or found in self._abandoned
        elif lost is not None and self._protected is not None and self._fits(self._protected):
            assert found is not None
            assert found >= self._protected
        self._newest = found
        self._abandoned.clear()
        replaces = found is None or (self._protected is not None and found < self._protected)
        if lost is not None or replaces:
            self._protected = None

    def _fits(self, found: WorldSave) -> bool:
        """Objects are each rank's own."""
        save, _, size = self._saved[found]
        return save.kind != "object" or size == self._world.size

    def _go_back(self) -> None:
        """A program may load an older step of `tier.at` by its number."""
        world = self._world
        common = set.intersection(*(world.own_saves(rank) for rank in range(world.size)))
        older = [
            save
            for save in common
            if self._newest is not None
            and save < self._newest
            and save.attempt == world.attempt
            and save.step != self._newest.step
            and self._saved[save][0].kind == "dcp"
        ]
        if older and self._newest is not None:
            self._abandoned.add(self._newest)
            self._newest = older[0]
            self._load(self._newest)
            self._check_newest()
            if self._protected is not None and self._protected > self._newest:
                self._protected = None

    def _load(self, save: WorldSave) -> None:
        results = self._world.run(lambda rank: self._load_on(rank, save))
        assert results == [None] * self._world.size

    def _load_on(self, rank: int, save: WorldSave) -> None:
        tier, (saved, count, size) = self._world.tiers[rank], self._saved[save]
        states = [_state(owner, count, saved.numels[owner]) for owner in range(size)]
        if saved.kind == "dcp":
            wanted = {name: tensor for state in states for name, tensor in state.items()}
            state = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
            _load_state_dict(state, tier.at(save.step), no_dist=False)
            assert _content(state) == _content(wanted)
        elif saved.kind == "object":
            assert _content(tier.load()) == _content(states[rank])
        else:
            folder = self._world.folder / f"loaded-{rank}"
            assert tier.load_folder(folder) == save.step
            for owner, state in enumerate(states):
                assert (folder / f"rank-{owner}").read_bytes() == _content(state)

    def _note_protected(self) -> None:
        world = self._world
        everywhere = set.intersection(
            *(world.own_saves(rank) & world.partner_saves(rank) for rank in range(world.size))
        )
        if self._newest in everywhere:
            self._protected = self._newest


def _step(save: WorldSave | None) -> int | None:
    return save.step if save is not None else None


def _state(rank: int, count: int, numel: int) -> dict[str, torch.Tensor]:
    return {f"w{rank}": torch.full((numel,), float(10 * count + rank))}


def _content(state: dict[str, torch.Tensor]) -> bytes:
    return b"".join(tensor.numpy().tobytes() for tensor in state.values())
