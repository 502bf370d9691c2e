"""Crash points of real processes that save, replicate and publish: killed at every operation and at
random moments."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.support.checkpoint.remote_job import KEEP, Job, check
from tests.support.checkpoint.remote_job import Saved as SavedRemotely
from tests.support.faults.crash_point_list import CrashPoints, seeded_runs
from tests.support.faults.killed import KilledProcess, Operation
from tests.support.memory.crashing_nodes import Receiver, Sender
from tests.support.memory.data_nodes import PATIENT
from tests.support.memory.memory_states import (
    MESH,
    RANK,
    RecoveredNode,
    Saved,
    open_or_create,
    save,
)
from tests.support.memory.shm import SECRET
from tests.support.waiting import DEADLINE_S

from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.memory import frozen_copies, wire
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.replicate import Replicator
from holdfast_workers.memory.segment import Segment
from holdfast_workers.protocol.messages import Partner, Place

pytestmark = pytest.mark.chaos

STORES: Sequence[Operation] = (
    (os, "open"),
    (os, "posix_fallocate"),
    (os, "pwrite"),
    (mmap, "mmap"),
    (Path, "rename"),
    (np, "frombuffer"),
    (Segment, "_clear_word"),
    (Segment, "_next_seq"),
    (Segment, "_write_word"),
    (Segment, "close"),
)
FILES: Sequence[Operation] = (
    (os, "fsync"),
    (os, "unlink"),
    (os, "rmdir"),
    (Path, "open"),
    (Path, "mkdir"),
    (Path, "rename"),
    (Path, "unlink"),
    (Path, "hardlink_to"),
    (Path, "read_bytes"),
)
MESSAGES: Sequence[Operation] = (
    (wire, "send_header"),
    (wire, "receive_header"),
    (wire, "send_payload"),
    (wire, "receive_into"),
    (Segment, "_clear_word"),
    (Segment, "_next_seq"),
    (Segment, "_write_word"),
)


def _kill_at_each(
    body: Callable[[], None], operations: Sequence[Operation], check_state: Callable[[], None]
) -> int:
    """Run `body` once per operation that it performs and kill it there. Returns the count."""
    at = 0
    while KilledProcess(body, operations, at).end():
        check_state()
        at += 1
    check_state()
    return at


def _kill_at_moments(
    body: Callable[[], None], moments: Sequence[float], check_state: Callable[[], None]
) -> int:
    for after_s in moments:
        child = KilledProcess(body)
        child.kill(after_s)
        child.end()
        check_state()
    return len(moments)


class SavingWorker:
    """A worker that continues from the newest saved step, and writes a frozen copy of each step."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / MESH / f"own-{RANK}.seg"
        self.path.parent.mkdir(parents=True)
        self.newest = 0

    def work(self) -> None:
        own = open_or_create(self.path)
        for step in range(self.newest + 1, self.newest + 4):
            save(own, Saved(1, step))
            path = frozen_copies.copy_path(self.root, RANK, step, 1)
            with Segment.create(path, own.layout) as copy:
                save(copy, Saved(1, step))

    def check(self) -> None:
        node = RecoveredNode(self.root)
        known = [Saved(1, step) for step in range(max(1, self.newest - 1), self.newest + 4)]
        node.check(known, [], verified=False)
        newest = max((held.step for held in node.store.held()), default=0)
        assert newest >= self.newest, f"step {self.newest} was lost"
        self.newest = newest
        assert node.bad == []
        assert [path.name for path in self.root.rglob("*.seg")] in ([], [self.path.name])
        assert not list(self.root.rglob(".*.new"))
        node.close()


@seeded_runs
def test_a_killed_worker_leaves_its_committed_states(shm: Path, run: int) -> None:
    points = CrashPoints("real processes: workers", run)
    worker = SavingWorker(shm / "memory")
    points.tried += _kill_at_each(worker.work, STORES, worker.check)
    points.tried += _kill_at_moments(worker.work, points.moments(80, 0.006), worker.check)
    points.assert_enough()


@seeded_runs
def test_a_killed_saver_or_finalizer_leaves_the_published_checkpoints(
    shm: Path, monkeypatch: pytest.MonkeyPatch, run: int
) -> None:
    points = CrashPoints("real processes: savers", run)
    job = Job(shm / "copies", monkeypatch)
    job.root = root = LocalStorage(shm / "checkpoints")
    history = [SavedRemotely(1, 1)]
    job.checkpoint(history[0])

    def following() -> SavedRemotely:
        return SavedRemotely(history[-1].step + 1, history[-1].attempt + 1)

    def publish() -> None:
        job.checkpoint(following())

    def check_and_continue() -> None:
        """Check that the previous checkpoint is intact and the next attempt removes leftovers."""
        check(root, [*history, following()], history[-1:])
        history.extend([following(), SavedRemotely(history[-1].step + 2, history[-1].attempt + 2)])
        publish_in_process(history[-1])

    def publish_in_process(saved: SavedRemotely) -> None:
        job.checkpoint(saved)
        check(root, history, [saved])
        assert len(root.folders()) <= KEEP, "leftovers remain"

    points.tried += _kill_at_each(publish, FILES, check_and_continue)
    began = time.monotonic()
    check_and_continue()
    moments = points.moments(30, time.monotonic() - began)
    points.tried += _kill_at_moments(publish, moments, check_and_continue)
    points.assert_enough()


class Pair:
    """A worker's node and its partner's node, each in this process or in another."""

    def __init__(self, root: Path) -> None:
        self.receiver = Receiver(root / "receiver", Place.REPLICA)
        self.root = root
        self.newest = 0

    def send(self, port: int, step: int) -> bool:
        """Save a step and try once to replicate it. True if it arrived."""
        sender = Sender(self.root / "sender")
        sender.step = step - 1
        sender.save()
        ended, replicated = threading.Event(), []

        def arrived(*what: object) -> None:
            replicated.append(what)
            ended.set()

        replicator = Replicator(
            sender.store,
            SECRET,
            arrived,
            lambda *_: ended.set(),
            timeouts=PATIENT,
            retry_s=60.0,
        )
        replicator.set_partners(RANK, (Partner("partner", "127.0.0.1", port),))
        replicator.offer(RANK, 1, step)
        assert ended.wait(DEADLINE_S)
        replicator.close()
        return bool(replicated)

    def serve(self, port_fd: int) -> None:
        """The partner's agent, until it is killed or its parent ends it."""
        server = DataServer(self.receiver.store, SECRET, "127.0.0.1", timeouts=PATIENT)
        os.write(port_fd, server.port.to_bytes(2, "big"))
        threading.Event().wait(2 * DEADLINE_S)

    def push_to_a_process(self, operations: Sequence[Operation], at: int) -> bool:
        """Replicate one step to a partner that is killed at operation number `at`. True if the
        partner was killed before the step arrived."""
        reader, writer = os.pipe()
        partner = KilledProcess(lambda: self.serve(writer), operations, at)
        port = int.from_bytes(os.read(reader, 2), "big")
        for fd in (reader, writer):
            os.close(fd)
        arrived = self.send(port, self.newest + 1)
        partner.kill(0.0)
        partner.end()
        self.check()
        return not arrived

    def check(self) -> None:
        """Check the partner's segments as its restarted agent does, then replicate one step."""
        if self.newest:
            self.receiver.check(self.newest + 1, self.newest)
        with closing(
            DataServer(self.receiver.store, SECRET, "127.0.0.1", timeouts=PATIENT)
        ) as server:
            self.send(server.port, self.newest + 1)
        self.newest += 1
        self.receiver.check(self.newest, self.newest)


@pytest.mark.cell("P4", "agent")
@seeded_runs
def test_a_killed_partner_keeps_its_complete_replicas(shm: Path, run: int) -> None:
    points = CrashPoints("real processes: partners", run)
    pair = Pair(shm)
    while pair.push_to_a_process(MESSAGES, points.tried):
        points.tried += 1
    points.assert_enough()


@seeded_runs
def test_a_killed_sender_leaves_its_partner_intact(shm: Path, run: int) -> None:
    points = CrashPoints("real processes: senders", run)
    pair = Pair(shm)

    with closing(DataServer(pair.receiver.store, SECRET, "127.0.0.1", timeouts=PATIENT)) as server:

        def send() -> None:
            pair.send(server.port, pair.newest + 1)

        points.tried += _kill_at_each(send, MESSAGES, pair.check)
        points.tried += _kill_at_moments(send, points.moments(60, 0.01), pair.check)
    points.assert_enough()
