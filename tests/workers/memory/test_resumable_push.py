from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.faults.faulty_link import Direction, Fault, FaultType, FaultyLink
from tests.support.memory.shm import MESH, SECRET, content, layout_of, write
from tests.support.waiting import DEADLINE_S, eventually

from holdfast_workers.memory import wire
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.replicate import Replicator
from holdfast_workers.memory.resumable_push import AnnouncedState, ReplicaIntake
from holdfast_workers.memory.segment import Segment
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.protocol.messages import Partner, Place

NBYTES = 40 << 20
PIECE = 4 << 20


@pytest.fixture
def partner(shm: Path) -> Iterator[tuple[SegmentStore, DataServer]]:
    store = SegmentStore(shm / "partner", MESH)
    server = DataServer(store, SECRET, "127.0.0.1")
    yield store, server
    server.close()


def test_a_push_that_was_cut_off_resumes_where_it_stopped(
    shm: Path, partner: tuple[SegmentStore, DataServer]
) -> None:
    store, server = partner
    link = FaultyLink(server.port, Fault(FaultType.CUT, Direction.UP, NBYTES // 2))
    own = SegmentStore(shm / "own", MESH)
    lost: list[str] = []
    arrived = threading.Event()
    replicator = Replicator(
        own,
        SECRET,
        lambda *_: arrived.set(),
        lambda _rank, _partner, reason, _others: lost.append(reason),
        retry_s=0.05,
    )
    replicator.set_partners(0, (Partner("partner", "127.0.0.1", link.port),))
    write(own.ensure(0, Place.OWN, layout_of(NBYTES)), 1, 7)
    replicator.offer(0, 1, 7)
    assert arrived.wait(DEADLINE_S)
    replicator.close()
    link.close()

    assert len(lost) == 1
    sent_again = len(link.forwarded[Direction.UP])
    assert sent_again < NBYTES // 2 + 2 * PIECE  # only the piece in flight is sent twice
    assert [(held.attempt, held.step) for held in store.held(verified=True)] == [(1, 7)]


def test_bytes_received_before_the_break_are_verified_too(shm: Path) -> None:
    """Bytes received after the break do not prove those received before it."""
    segment = Segment.create(shm / "replica-0.seg", layout_of(NBYTES))
    raw = content(NBYTES, 1, 7)
    intake, state = ReplicaIntake(), AnnouncedState(1, 7, digest="0" * 32)
    assert intake.begin(segment, state) == 0
    with pytest.raises(wire.WireError):
        received(intake, segment, raw[: 2 * PIECE + 5])
    assert intake.begin(segment, state) == 2 * PIECE
    assert received(intake, segment, raw[2 * PIECE :]) is False


def test_a_different_state_starts_from_its_first_byte(shm: Path) -> None:
    segment = Segment.create(shm / "replica-0.seg", layout_of(NBYTES))
    intake = ReplicaIntake()
    intake.begin(segment, AnnouncedState(1, 7, digest="7" * 32))
    with pytest.raises(wire.WireError):
        received(intake, segment, content(PIECE, 1, 7))
    assert intake.begin(segment, AnnouncedState(1, 8, digest="8" * 32)) == 0
    assert intake.begin(segment, AnnouncedState(1, 7, digest="7" * 32)) == 0


def test_a_recreated_segment_starts_from_the_first_byte(shm: Path) -> None:
    intake, state = ReplicaIntake(), AnnouncedState(1, 7, digest="7" * 32)
    with Segment.create(shm / "replica-0.seg", layout_of(NBYTES)) as before:
        intake.begin(before, state)
        with pytest.raises(wire.WireError):
            received(intake, before, content(PIECE, 1, 7))
    assert intake.begin(Segment.create(shm / "replica-0.seg", layout_of(NBYTES)), state) == 0


def test_a_segment_dropped_during_a_push_frees_its_memory(shm: Path) -> None:
    store = SegmentStore(shm / "partner", MESH)
    intake = ReplicaIntake()
    intake.begin(store.ensure(0, Place.REPLICA, layout_of(NBYTES)), AnnouncedState(1, 7, "7" * 32))
    store.drop(0, Place.REPLICA)
    eventually(lambda: str(shm) not in Path("/proc/self/maps").read_text())


def received(intake: ReplicaIntake, segment: Segment, raw: bytes) -> bool:
    """Receive `raw` on a connection that then ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def send() -> None:
            with contextlib.suppress(OSError):
                theirs.sendall(raw)
            wire.shut(theirs)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            return intake.receive(segment, ours)
        finally:
            ours.close()
            sender.join(DEADLINE_S)
