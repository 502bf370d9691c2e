"""Random histories of a program that saves: whatever fails, every load has one step on all ranks,
the newest that was whole, with the bytes that were saved."""

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

from holdfast_workers.program_memory.world_saves import WorldSave

KINDS = ("dcp", "object", "folder")


@dataclass(frozen=True)
class Save:
    """All ranks save. `again`: the step that was saved last."""

    kind: str
    numels: tuple[int, int, int]
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
    """All processes end. `lost`: a node that is lost. `loads`: whether the program loads."""

    lost: int | None
    loads: bool


RANKS = st.integers(0, 2)
POINTS = st.sampled_from(["begin", "begun", "commit", "committed"])
FAILURES = st.dictionaries(RANKS, st.builds(Fault, POINTS, st.just(False)), min_size=1, max_size=2)
DEATHS = st.dictionaries(RANKS, st.builds(Fault, POINTS, st.just(True)), min_size=1, max_size=2)
NO_FAULT: dict[int, Fault] = {}
ALL = frozenset(range(3))
SAVES = st.builds(
    Save,
    kind=st.sampled_from(KINDS),
    numels=st.tuples(*[st.sampled_from([8, 8, 8, 3000])] * 3),
    faults=st.integers(0, 7).flatmap(
        lambda case: DEATHS if case == 0 else FAILURES if case < 4 else st.just(NO_FAULT)
    ),
    pushed=st.integers(0, 2).flatmap(lambda case: st.just(ALL) if case else st.frozensets(RANKS)),
    again=st.integers(0, 5).map(lambda case: case == 0),
)
RESTARTS = st.builds(
    Restart,
    lost=st.integers(0, 3).flatmap(lambda case: RANKS if case else st.none()),
    loads=st.integers(0, 3).map(lambda case: case > 0),
)
EVENTS = st.integers(0, 9).flatmap(
    lambda case: RESTARTS if case == 0 else st.just(GoBack()) if case == 1 else SAVES
)
HISTORIES = st.lists(EVENTS, min_size=4, max_size=12)


def saved(fails_on: int | None = None) -> Save:
    """An object, pushed to all partners; one rank may have no room for it."""
    faults = {} if fails_on is None else {fails_on: Fault("begin", dies=False)}
    return Save("object", (8, 8, 8), faults, ALL, again=False)


@pytest.mark.seconds
@settings(max_examples=80)
@example(2, [saved(), saved(), saved(1), saved(1)], Restart(lost=None, loads=True))
@example(2, [saved(), saved(1), saved(1)], Restart(lost=0, loads=True))
@given(size=st.integers(2, 3), history=HISTORIES, end=RESTARTS)
def test_every_load_has_the_newest_step_that_was_whole(
    size: int, history: list[Save | GoBack | Restart], end: Restart
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="holdfast-saves-", dir="/dev/shm"))
    try:
        with simulated_world(folder, size) as world:
            Checked(world).play([*history, end])
    finally:
        shutil.rmtree(folder)


class Checked:
    """Plays a history, and compares what the ranks load with what they saved."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world
        self._step = 0
        self._count = 0
        self._saved: dict[WorldSave, tuple[Save, int]] = {}
        """With a number that is part of its content."""
        self._newest: WorldSave | None = None
        """The newest that was whole, or the one that the program loaded after that."""
        self._abandoned: set[WorldSave] = set()
        """By a program that went back."""
        self._protected: WorldSave | None = None
        """The newest that was whole on all ranks and at all partners."""

    def play(self, history: list[Save | GoBack | Restart]) -> None:
        self._world.start_attempt()
        for event in history:
            match event:
                case Save():
                    self._save(event)
                case GoBack():
                    self._go_back()
                case Restart(lost=lost, loads=loads):
                    self._restart(lost, loads=loads)
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
            self._saved[found] = save, self._count
            if len(world.committed[found]) == world.size:
                self._newest = found
                self._abandoned.clear()
        for rank in save.pushed:
            if rank < world.size:
                world.push(rank)
        if any(isinstance(result, Died) for result in results):
            self._restart(None, loads=True)
        else:
            self._check_newest()

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
        step = self._newest.step if self._newest is not None else None
        assert newest == [step] * self._world.size

    def _restart(self, lost: int | None, *, loads: bool) -> None:
        world = self._world
        if lost is not None and lost < world.size:
            world.lose_node(lost)
        world.start_attempt()
        self._check_restore(lost)
        if loads and self._newest is not None:
            self._load(self._newest)
        self._check_newest()

    def _check_restore(self, lost: int | None) -> None:
        """The attempt starts from the newest whole save; after the loss of a node, from that which
        the partners protected, or from a newer one."""
        found = self._world.restored
        if found is not None:
            assert len(self._world.committed[found]) == self._world.size
        if lost is None:
            assert found == self._newest or found in self._abandoned
        elif self._protected is not None:
            assert found is not None
            assert found >= self._protected
        self._newest = found
        self._abandoned.clear()
        if lost is not None:
            self._protected = None

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
        tier, (saved, count) = self._world.tiers[rank], self._saved[save]
        wanted = _state(rank, count, saved.numels[rank])
        if saved.kind == "dcp":
            state = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
            _load_state_dict(state, tier.at(save.step), no_dist=False)
            assert _content(state) == _content(wanted)
        elif saved.kind == "object":
            assert _content(tier.load()) == _content(wanted)
        else:
            folder = self._world.folder / f"loaded-{rank}"
            assert tier.load_folder(folder) == save.step
            for other in range(self._world.size):
                content = _content(_state(other, count, saved.numels[other]))
                assert (folder / f"rank-{other}").read_bytes() == content

    def _note_protected(self) -> None:
        world = self._world
        everywhere = set.intersection(
            *(world.own_saves(rank) & world.partner_saves(rank) for rank in range(world.size))
        )
        if self._newest in everywhere:
            self._protected = self._newest


def _state(rank: int, count: int, numel: int) -> dict[str, torch.Tensor]:
    return {f"w{rank}": torch.full((numel,), float(10 * count + rank))}


def _content(state: dict[str, torch.Tensor]) -> bytes:
    (tensor,) = state.values()
    return tensor.numpy().tobytes()
