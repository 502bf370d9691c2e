"""Agents that watch real workers report stalled ranks from outside."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.nodes.supervised import SupervisedRun, small_training, supervised
from tests.support.ranks.recipes import EvaluatesTwice
from tests.support.waiting import DEADLINE_S

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_workers.protocol.answers import Inspections
from holdfast_workers.protocol.commands import Inspect, Request
from holdfast_workers.protocol.messages import Beat, Inspection
from holdfast_workers.protocol.signals import RankStalled, Signal, SignalKind
from holdfast_workers.spec import DetectionSpec

pytestmark = pytest.mark.chaos

FLOOR_S = 0.5
LEARNED_STEPS = 30
"""By then every phase was measured often enough for a limit near the floor."""

FIRST_STEPS = 8
"""The first steps of an attempt, which have their own limits, plus a margin."""


class Watched:
    """A run whose stall signals are recorded and withheld from its supervisor."""

    def __init__(self, run: SupervisedRun) -> None:
        self.run = run
        self.stalls: list[Signal] = []
        run.wait_step(LEARNED_STEPS)
        self._pass_on = run.agents.on_signal
        run.agents.on_signal = self._receive

    def _receive(self, reported: Signal) -> None:
        if reported.kind is SignalKind.RANK_STALLED:
            self.stalls.append(reported)
        else:
            self._pass_on(reported)

    def wait_stall(self, rank: int, since: int) -> Signal:
        """The first stall of `rank` after the first `since` stalls. The limit of a phase without
        measurements would outlast the wait."""

        def found() -> list[Signal]:
            return [reported for reported in self.stalls[since:] if reported.rank == rank]

        self.run.wait(lambda: bool(found()))
        return found()[0]

    def replace(self, rank: int) -> None:
        """Kill a hung rank; return once its replacement is past the first steps."""
        self.run.kill(rank)
        self.run.wait_step(max(self.run.rows) + FIRST_STEPS)

    def inspect(self, rank: int) -> Inspection:
        seat, worker = self.run.workers()[rank]
        agents = self.run.agents
        request = Request(Inspect(seat, worker.attempt, 0), agents.report(seat).epoch)
        call = agents.call(seat, request, Inspections, timeout_s=DEADLINE_S)
        inspected = call.result().inspections
        return next(inspection for inspection in inspected if inspection.beat.rank == rank)


def beat_of(stall: Signal) -> Beat:
    assert isinstance(stall.detail, RankStalled)
    return stall.detail.beat


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A run with learned limits; every test leaves it training."""
    training = small_training(100_000, detection=DetectionSpec(hang_floor_s=FLOOR_S))
    with supervised(tmp_path_factory.mktemp("watched"), training, standbys=0) as run:
        yield Watched(run)


def test_a_stopped_rank_is_reported_and_inspected_from_outside(watched: Watched) -> None:
    pid = watched.run.pids()[2]
    before = len(watched.stalls)
    os.kill(pid, signal.SIGSTOP)
    reported = watched.wait_stall(2, before)
    beat = beat_of(reported)
    assert (reported.pid, beat.rank, beat.pid) == (pid, 2, pid)
    assert beat.age_s > beat.limit_s
    seen = watched.inspect(2)
    assert seen.process == "T"
    assert seen.stack, seen.problem
    others = [watched.inspect(rank) for rank in (0, 1, 3)]
    assert all(other.process in "SR" for other in others)
    entered = {inspection.beat.rank: inspection.beat for inspection in [seen, *others]}
    waiting = [g for beat in entered.values() for g in beat.groups if g.entered > g.left]
    assert waiting, entered
    watched.replace(2)


def test_a_stall_is_reported_once(watched: Watched) -> None:
    """Must be the last test of this run: the run learns the length of a stall that ended."""
    pid = watched.run.pids()[1]
    before = len(watched.stalls)
    os.kill(pid, signal.SIGSTOP)
    for rank in range(4):
        watched.wait_stall(rank, before)
    reported = len(watched.stalls)
    deadline = time.monotonic() + 2 * FLOOR_S
    watched.run.wait(lambda: time.monotonic() > deadline)
    assert len(watched.stalls) == reported
    os.kill(pid, signal.SIGCONT)
    watched.run.wait_step(max(watched.run.rows) + 5)
    os.kill(pid, signal.SIGSTOP)
    watched.wait_stall(1, reported)
    os.kill(pid, signal.SIGCONT)
    watched.run.wait_step(max(watched.run.rows) + 5)


def test_a_long_phase_of_all_ranks_is_reported_without_an_incident(tmp_path: Path) -> None:
    """An evaluation over its limit on every rank is a wait; a phase with a declared time is not
    reported at all."""
    limit_s = EvaluatesTwice.takes_s / 3
    training = small_training(
        30,
        recipe="tests.support.ranks.recipes:EvaluatesTwice",
        detection=DetectionSpec(limits={"evaluate": limit_s, "user": limit_s}),
    )
    reported: list[Signal] = []
    with supervised(tmp_path, training, standbys=0) as run:
        pass_on = run.agents.on_signal

        def receive(signal: Signal) -> None:
            reported.append(signal)
            pass_on(signal)

        run.agents.on_signal = receive
        end = run.wait_end()
        assert end["outcome"] == "SUCCEEDED", run.story()
        assert not run.of(EventKind.INCIDENT_OPENED), run.story()
    stalls = [beat_of(stall) for stall in reported if stall.kind is SignalKind.RANK_STALLED]
    assert {beat.phase for beat in stalls} == {"evaluate"}
    assert {beat.rank for beat in stalls} == {0, 1, 2, 3}
