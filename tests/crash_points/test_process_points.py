"""Real processes that save, replicate and publish, killed at every operation and at any moment."""

from __future__ import annotations

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
from tests.support.faults.crash_point_list import Points, seeded_runs
from tests.support.faults.killed import Killed, Operation
from tests.support.memory.crashing_nodes import TIMES, Receiver, Sender
from tests.support.memory.memory_states import MESH, RANK, Recovered, Saved, open_or_create, save
from tests.support.memory.shm import SECRET

from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.memory import frozen_copies, segment, wire
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.replicate import Replicator
from holdfast_workers.memory.segment import Segment
from holdfast_workers.protocol.messages import Partner, Place

pytestmark = pytest.mark.chaos

STORES: Sequence[Operation] = (
    (os, "open"),
    (os, "posix_fallocate"),
    (os, "pwrite"),
    (segment.mmap, "mmap"),
    (Path, "rename"),
    (np, "frombuffer"),
    (Segment, "_clear_word"),
    (Segment, "_take_number"),
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
    (Segment, "_take_number"),
    (Segment, "_write_word"),
)


def _kill_at_each(
    body: Callable[[], None], operations: Sequence[Operation], check_it: Callable[[], None]
) -> int:
    """Once at every operation that `body` comes to; how often that was."""
    at = 0
    while Killed(body, operations, at).end():
        check_it()
        at += 1
    check_it()
    return at


def _kill_at_moments(
    body: Callable[[], None], moments: Sequence[float], check_it: Callable[[], None]
) -> int:
    for after_s in moments:
        child = Killed(body)
        child.kill(after_s)
        child.end()
        check_it()
    return len(moments)


class Memory:
    """A worker that saves on from what lies there, and leaves a copy for the saver each time."""

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
        node = Recovered(self.root)
        known = [Saved(1, step) for step in range(max(1, self.newest - 1), self.newest + 4)]
        node.check(known, [], verified=False)
        newest = max((one.step for one in node.store.held()), default=0)
        assert newest >= self.newest, f"step {self.newest} was lost"
        self.newest = newest
        assert node.bad == []
        assert [path.name for path in self.root.rglob("*.seg")] in ([], [self.path.name])
        assert not list(self.root.rglob(".*.new"))
        node.close()


@seeded_runs
def test_a_killed_worker_leaves_what_it_had_committed(shm: Path, run: int) -> None:
    points = Points("real processes: workers", run)
    memory = Memory(shm / "memory")
    points.tried += _kill_at_each(memory.work, STORES, memory.check)
    points.tried += _kill_at_moments(memory.work, points.moments(80, 0.006), memory.check)
    points.enough()


@seeded_runs
def test_a_killed_saver_or_finalizer_leaves_what_was_published(
    shm: Path, monkeypatch: pytest.MonkeyPatch, run: int
) -> None:
    points = Points("real processes: savers", run)
    job = Job(shm / "copies", monkeypatch)
    job.root = root = LocalStorage(shm / "checkpoints")
    history = [SavedRemotely(1, 1)]
    job.checkpoint(history[0])

    def following() -> SavedRemotely:
        return SavedRemotely(history[-1].step + 1, history[-1].attempt + 1)

    def publish() -> None:
        job.checkpoint(following())

    def look() -> None:
        """The one before is there, and that of the next attempt clears away what was left."""
        check(root, [*history, following()], history[-1:])
        history.extend([following(), SavedRemotely(history[-1].step + 2, history[-1].attempt + 2)])
        publish_in_here(history[-1])

    def publish_in_here(saved: SavedRemotely) -> None:
        job.checkpoint(saved)
        check(root, history, [saved])
        assert len(root.folders()) <= KEEP, "left over"

    points.tried += _kill_at_each(publish, FILES, look)
    began = time.monotonic()
    look()
    moments = points.moments(30, time.monotonic() - began)
    points.tried += _kill_at_moments(publish, moments, look)
    points.enough()


class Pair:
    """A worker's node in this process or in another, and its partner's."""

    def __init__(self, root: Path) -> None:
        self.receiver = Receiver(root / "receiver", Place.REPLICA)
        self.root = root
        self.newest = 0

    def send(self, port: int, step: int) -> bool:
        """Save a step and try once to replicate it; whether it arrived."""
        sender = Sender(self.root / "sender")
        sender.step = step - 1
        sender.save()
        ended, replicated = threading.Event(), []

        def arrived(*what: int) -> None:
            replicated.append(what)
            ended.set()

        replicator = Replicator(
            sender.store,
            SECRET,
            arrived,
            lambda *_: ended.set(),
            timeouts=TIMES,
            retry_s=60.0,
        )
        replicator.set_partners(RANK, (Partner("partner", "127.0.0.1", port),))
        replicator.offer(RANK, 1, step)
        assert ended.wait(10)
        replicator.close()
        return bool(replicated)

    def serve(self, tell_port: int) -> None:
        """The partner's agent, until it is killed or its parent ends it."""
        server = DataServer(self.receiver.store, SECRET, "127.0.0.1", timeouts=TIMES)
        os.write(tell_port, server.port.to_bytes(2, "big"))
        threading.Event().wait(30)

    def push_to_a_process(self, operations: Sequence[Operation], at: int) -> bool:
        """One step to a partner that is killed at an operation; whether it came to that."""
        reader, writer = os.pipe()
        partner = Killed(lambda: self.serve(writer), operations, at)
        port = int.from_bytes(os.read(reader, 2), "big")
        for fd in (reader, writer):
            os.close(fd)
        arrived = self.send(port, self.newest + 1)
        partner.kill(0.0)
        partner.end()
        self.check()
        return not arrived

    def check(self) -> None:
        """The partner's segments as its next agent finds them."""
        if self.newest:
            self.receiver.check(self.newest + 1, self.newest)
        with closing(
            DataServer(self.receiver.store, SECRET, "127.0.0.1", timeouts=TIMES)
        ) as server:
            self.send(server.port, self.newest + 1)
        self.newest += 1
        self.receiver.check(self.newest, self.newest)


@seeded_runs
def test_a_killed_partner_keeps_what_it_had_whole(shm: Path, run: int) -> None:
    points = Points("real processes: partners", run)
    pair = Pair(shm)
    while pair.push_to_a_process(MESSAGES, points.tried):
        points.tried += 1
    points.enough()


@seeded_runs
def test_a_killed_sender_leaves_its_partner_whole(shm: Path, run: int) -> None:
    points = Points("real processes: senders", run)
    pair = Pair(shm)

    with closing(DataServer(pair.receiver.store, SECRET, "127.0.0.1", timeouts=TIMES)) as server:

        def send() -> None:
            pair.send(server.port, pair.newest + 1)

        points.tried += _kill_at_each(send, MESSAGES, pair.check)
        points.tried += _kill_at_moments(send, points.moments(60, 0.01), pair.check)
    points.enough()
