"""Training continues on another mesh from memory alone: real agents, real workers, no disk.

Holdfast does not change the mesh of a job by itself yet. Here the test orders it as the supervisor
would, with the restore point that the supervisor would choose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from tests.support.nodes.local_agents import LocalAgents
from tests.support.nodes.supervised import small_training
from tests.support.waiting import eventually

from holdfast_service.placement.restore_points import (
    HeldCopy,
    HistoryLine,
    RestorePoint,
    RestoreSource,
    find_restore_point,
    restore_for,
)
from holdfast_workers.checkpoint.boxes import Box
from holdfast_workers.memory.segment_store import SegmentStore, mesh_tag
from holdfast_workers.protocol.answers import AgentReport, Done, PollAnswer
from holdfast_workers.protocol.commands import Command, Fence, Form, Poll, Request
from holdfast_workers.protocol.messages import FormOrder, Partner, Place, Seat, StepRow
from holdfast_workers.protocol.signals import Signal, SignalKind
from holdfast_workers.spec import CheckpointSpec, MemoryTierSpec, RemoteTierSpec
from holdfast_workers.state.layout import SMALL_STATE

pytestmark = [pytest.mark.chaos, pytest.mark.soak]
WAIT_S = 60.0
EVERY = 40
"""Steps between memory checkpoints: far enough apart to read a checkpoint before it is
overwritten."""
PER_NODE = 2
Expected = TypeVar("Expected")


class Fleet:
    """Agents, commanded by the test as by a supervisor."""

    def __init__(self, folder: Path, seats: int) -> None:
        training = small_training(
            100_000,
            blocks=2,
            micro_batches=2,  # one for each rank where four ranks share the batch
            checkpoint=CheckpointSpec(
                memory=MemoryTierSpec(every_steps=EVERY), remote=RemoteTierSpec(every_steps=0)
            ),
        )
        self.signals: list[Signal] = []
        self.agents = LocalAgents(
            seats,
            training.model_dump(mode="json"),
            training.parallel.mesh,
            PER_NODE,
            folder / "checkpoints",
        )
        self.agents.on_signal = self.signals.append
        self.seats = list(self.agents.seats)
        self.line = HistoryLine()
        self.agents.ensure()
        self.wait(lambda: all(self.agents.report(seat).ready for seat in self.seats))

    def call(self, command: Command, answer: type[Expected]) -> Expected:
        request = Request(command, epoch=1)
        return self.agents.call(command.agent, request, answer, timeout_s=WAIT_S).result()

    def lose(self, seat: str) -> None:
        self.agents.kill_node(seat)
        self.seats.remove(seat)

    def fence(self, attempt: int) -> dict[str, AgentReport]:
        return {seat: self.call(Fence(seat, attempt), AgentReport) for seat in self.seats}

    def form(
        self, attempt: int, mesh: dict[str, int], reports: dict[str, AgentReport]
    ) -> RestorePoint:
        """Give the ranks to the first agents, each with the next agent as its partner."""
        copies = [
            HeldCopy(seat, report.incarnation, report.host, report.data_port, held)
            for seat, report in reports.items()
            for held in report.held
        ]
        world = math.prod(mesh.values())
        point = find_restore_point(
            world_size=world, mesh=mesh, copies=copies, remotes=(), line=self.line
        )
        self.line = self.line.with_attempt(attempt, point.step).with_run(attempt)
        store = reports[self.seats[0]].store_port
        for index in range(-(-world // PER_NODE)):
            seat = self.seats[index]
            partner = reports[self.seats[(index + 1) % len(self.seats)]]
            seats = tuple(
                Seat(
                    rank,
                    None,
                    restore_for(rank, seat, point),
                    (Partner(partner.agent, partner.host, partner.data_port),),
                )
                for rank in range(index * PER_NODE, min(world, (index + 1) * PER_NODE))
            )
            order = FormOrder(attempt, mesh, world, "127.0.0.1", store, seats)
            self.call(Form(seat, order), Done)
        return point

    def wait_joined(self, attempt: int, world: int) -> None:
        def joined() -> bool:
            kinds = [signal.kind for signal in self.signals if signal.attempt == attempt]
            assert SignalKind.WORKER_FAILED not in kinds, self.signals
            return kinds.count(SignalKind.WORKER_JOINED) == world

        self.wait(joined)

    def wait_protected(self, attempt: int, step: int) -> StepRow:
        """The first row according to which every partner holds `step` or a later step."""
        found: list[StepRow] = []

        def protected() -> bool:
            poll = Request(Poll(after_row=(attempt, 0)))
            call = self.agents.call(self.seats[0], poll, PollAnswer, timeout_s=WAIT_S)
            rows = call.result().rows
            found[:] = [row for row in rows if row.protected_step >= step]
            return bool(found)

        self.wait(protected)
        return found[0]

    def state(self, mesh: dict[str, int], attempt: int, step: int) -> dict[str, np.ndarray]:
        """The global state from the living nodes' own segments and replicas, verified."""
        whole: dict[str, np.ndarray] = {}
        filled: dict[str, np.ndarray] = {}
        for seat in self.seats:
            store = SegmentStore(self.agents.root / seat, mesh_tag(mesh))
            for held in store.held():
                if (held.attempt, held.step) == (attempt, step):
                    _put(store, held.rank, held.place, attempt, step, whole, filled)
        assert filled
        assert all(mask.all() for mask in filled.values())
        return whole

    def wait(self, condition: Callable[[], bool]) -> None:
        eventually(condition, WAIT_S, self.signals)


def _put(
    store: SegmentStore,
    rank: int,
    place: Place,
    attempt: int,
    step: int,
    whole: dict[str, np.ndarray],
    filled: dict[str, np.ndarray],
) -> None:
    segment = store.find(rank, place)
    assert segment is not None
    commit = segment.find(attempt, step)
    assert commit is not None
    payload = bytes(segment.payload(commit))
    assert segment.verify(commit)
    for entry in segment.layout.tensors:
        if entry.per_rank and entry.name != SMALL_STATE:
            continue
        array = whole.setdefault(entry.name, np.zeros(entry.global_shape, entry.dtype))
        mask = filled.setdefault(entry.name, np.zeros(entry.global_shape, bool))
        outer = Box((0,) * len(entry.shape), entry.global_shape)
        part = np.ndarray(entry.shape, entry.dtype, payload, entry.offset)
        region = Box(entry.offsets, entry.shape).within(outer)
        assert not mask[region].any() or np.array_equal(array[region], part)
        array[region], mask[region] = part, True


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path, 3)
    yield made
    made.agents.close()


def test_training_continues_from_memory_on_a_smaller_and_on_a_different_mesh(fleet: Fleet) -> None:
    first = {"dp_shard": 2, "tp": 2}
    point = fleet.form(1, first, fleet.fence(1))
    assert point.source is RestoreSource.INIT
    fleet.wait_protected(1, EVERY)
    computed, before = 1, first
    for attempt, mesh in ((2, {"dp_shard": 1, "tp": 2}), (3, {"dp_shard": 4, "tp": 1})):
        reports = fleet.fence(attempt)
        if attempt == 3:  # its partner holds the lost node's checkpoints too
            fleet.lose("n0")
            del reports["n0"]
        point = fleet.form(attempt, mesh, reports)
        assert (point.source, point.attempt, point.mesh) == (
            RestoreSource.RESHARD,
            computed,
            mesh_tag(before),
        )
        state = fleet.state(before, computed, point.step)
        fleet.wait_joined(attempt, math.prod(mesh.values()))
        taken_over = fleet.state(mesh, computed, point.step)
        assert taken_over.keys() == state.keys()
        for name, values in state.items():
            assert np.array_equal(taken_over[name], values), name
        row = fleet.wait_protected(attempt, point.step + EVERY)
        assert (row.attempt, math.isfinite(row.loss)) == (attempt, True)

        def only_mesh(mesh: dict[str, int] = mesh) -> bool:
            return _meshes_with_ranks(fleet, mesh) == {mesh_tag(mesh)}

        fleet.wait(only_mesh)
        computed, before = attempt, mesh


def _meshes_with_ranks(fleet: Fleet, mesh: dict[str, int]) -> set[str]:
    """The meshes of all checkpoints held by agents with ranks."""
    hosts = fleet.seats[: -(-math.prod(mesh.values()) // PER_NODE)]
    return {held.mesh for seat in hosts for held in fleet.agents.report(seat).held}
