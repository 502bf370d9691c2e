"""A node's watch over its ranks continues after a failed reading."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.nodes.agent_config import agent_config
from tests.support.waiting import eventually

from holdfast_workers.agent import progress_watch
from holdfast_workers.agent.progress_watch import ProgressWatch
from holdfast_workers.agent.signal_sender import SignalSender
from holdfast_workers.progress import beacon as beacons
from holdfast_workers.progress.beacon import RING_ENTRIES, Beacon, BeaconReader
from holdfast_workers.protocol.answers import WorkerReport
from holdfast_workers.protocol.messages import JOINING_PHASE, PREPARING_PHASE, WorkerState
from holdfast_workers.protocol.signals import Signal, SignalKind


class Node:
    """Two ranks that have made no progress since they entered a phase with a short limit."""

    def __init__(
        self, root: Path, *, period_s: float = 0.01, limit_s: float = 0.05, **training: Any
    ) -> None:
        config = agent_config(root, capacity=2, watch_period_s=period_s, training=training)
        self.limit_s = limit_s
        self.readings = 0
        self.failing = 0
        self.attempts = [1, 1]
        self.sent: list[Signal] = []
        self.windows: list[int] = []
        sender = SignalSender("n0", "life", self.sent.append)
        self.watch = ProgressWatch(config, self.workers, sender, self.windows.append)
        self.beacons = [self.standing(root, rank) for rank in range(2)]

    def standing(self, root: Path, rank: int) -> Beacon:
        path = beacons.path_of(root, f"w{rank}")
        beacons.create(path)
        beacon = Beacon(path)
        beacon.begin(1)
        beacon.enter("user", 3, bound_s=self.limit_s)
        return beacon

    def seat(self, rank: int, attempt: int) -> None:
        """The rank gets an order for a later attempt."""
        self.attempts[rank] = attempt

    def workers(self) -> tuple[WorkerReport, ...]:
        self.readings += 1
        if self.readings <= self.failing:
            raise RuntimeError("a reading that fails")
        return tuple(
            WorkerReport(f"w{rank}", os.getpid(), WorkerState.TRAINING, attempt, rank, 3, None)
            for rank, attempt in enumerate(self.attempts)
        )

    def stalled(self) -> set[int | None]:
        return {signal.rank for signal in self.sent if signal.kind is SignalKind.RANK_STALLED}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.watch.stop()


@pytest.mark.usefixtures("logs_on_stderr")
def test_a_failed_reading_is_logged_and_the_watch_continues(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    node.failing = 2
    node.watch.start()
    eventually(lambda: node.stalled() == {0, 1})
    assert "a reading that fails" in capfd.readouterr().err


@pytest.mark.usefixtures("logs_on_stderr")
def test_a_beacon_that_cannot_be_opened_does_not_hide_other_ranks(
    node: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def open_reader(path: Path) -> BeaconReader:
        if path.stem == "w0":
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return BeaconReader(path)

    monkeypatch.setattr(progress_watch, "BeaconReader", open_reader)
    node.watch.start()
    eventually(lambda: node.stalled() == {1})
    assert "Too many open files" in capfd.readouterr().err


def test_a_limit_that_ends_between_two_readings_is_seen_at_its_end(tmp_path: Path) -> None:
    node = Node(tmp_path, period_s=600.0, limit_s=0.3, detection={"hang_floor_s": 60.0})
    began = time.monotonic()
    node.watch.start()
    try:
        eventually(lambda: node.stalled() == {0, 1})
        assert time.monotonic() - began >= 0.3
        assert node.readings < 10
    finally:
        node.watch.stop()


def test_a_beacon_is_read_before_its_ring_of_phases_overflows(tmp_path: Path) -> None:
    beacons.create(tmp_path / "w.beacon")
    beacon = Beacon(tmp_path / "w.beacon")
    watched = progress_watch._WatchedWorker(BeaconReader(tmp_path / "w.beacon"), 1.0)
    beacon.begin(1)
    now = time.monotonic()
    assert watched.next_reading_in_s(60.0, now) == 60.0
    for _ in range(100):
        beacon.enter("forward", 1)
    assert len(watched.reader.ended_phases()) > 90
    assert watched.next_reading_in_s(60.0, now + 1.0) == pytest.approx(RING_ENTRIES / 2 / 100)


def test_a_rank_that_does_not_begin_its_order_is_reported_unless_it_still_prepares(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, detection={"hang_floor_s": 0.02})
    node.beacons[0].end()  # ready for an order; rank 1 is still in its phase
    for rank in range(2):
        node.seat(rank, 2)
    node.watch.start()
    try:
        eventually(lambda: node.stalled() == {0})
        phases = {beat.rank: beat.phase for beat in node.watch.beats()}
        assert phases == {0: JOINING_PHASE, 1: PREPARING_PHASE}
        (stalled,) = (signal for signal in node.sent if signal.kind is SignalKind.RANK_STALLED)
        assert (stalled.attempt, stalled.rank) == (2, 0)
    finally:
        node.watch.stop()


def test_the_first_window_that_ranks_read_is_known(node: Node) -> None:
    def first_window() -> int | None:
        del node.windows[:]
        node.watch.beats()
        return node.windows[-1] if node.windows else None

    first, second = node.beacons
    assert first_window() is None
    second.show_window(8)
    assert first_window() == 8
    first.show_window(0)
    assert first_window() == 0
    first.show_window(9)
    assert first_window() == 8
    node.seat(0, 2)
    node.seat(1, 2)
    assert first_window() is None, "what they read in an earlier attempt"
    first.begin(2)
    first.enter("load", 3)
    assert first_window() is None
    first.show_window(5)
    assert first_window() == 5
