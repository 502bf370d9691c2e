"""The I/O thread and its neighbours under what should not happen: it goes on, and late is late."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import eventually

from holdfast_workers.errors import StaleCommand
from holdfast_workers.fault_injection.fault_points import FaultPoints
from holdfast_workers.ipc import control_channel
from holdfast_workers.ipc.children import Child
from holdfast_workers.ipc.io_loop import NodeIO
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.fetch import SourceLost
from holdfast_workers.memory.segment import Segment
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.memory.state_delivery import Courier
from holdfast_workers.protocol.messages import Place, Restore, Tier
from holdfast_workers.state.layout import StateLayout, TensorEntry
from holdfast_workers.worker.main import Link

WAIT_S = 10.0
OPEN: list[socket.socket] = []
"""The agent's ends of the links made here: a link ends its process when that closes."""
SECRET = b"s" * 32


class Heard:
    """Notes what it is told, and cannot take a message that says `bad`."""

    def __init__(self) -> None:
        self.said: queue.Queue[str] = queue.Queue()
        self.logged: queue.Queue[str] = queue.Queue()
        self.gone: queue.Queue[str] = queue.Queue()

    def worker_said(self, name: str, message: dict[str, Any]) -> None:
        if message["op"] == "bad":
            raise LookupError("no such operation")
        self.said.put(name)

    def child_said(self, child: Child, message: dict[str, Any]) -> None: ...

    def child_logged(self, child: Child, text: str) -> None:
        self.logged.put(text)

    def child_exited(self, child: Child, detail: dict[str, int | str]) -> None:
        self.gone.put(child.name)

    def zygote_exited(self) -> None: ...


class Sleeper:
    """A process that does nothing, as a child; `theirs` is its end of the control socket."""

    def __init__(self, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
        )
        ours, self.theirs = control_channel.pair()
        log, self.log = os.pipe()
        os.set_blocking(log, False)
        pid = self.process.pid
        self.child = Child("worker", name, pid, os.pidfd_open(pid), ours, log)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.theirs.close()
        os.close(self.log)


@pytest.fixture
def sleepers() -> Iterator[list[Sleeper]]:
    made = [Sleeper("first"), Sleeper("second")]
    yield made
    for sleeper in made:
        sleeper.end()


def test_a_message_that_cannot_be_taken_in_ends_its_sender_and_nothing_else(
    sleepers: list[Sleeper],
) -> None:
    first, second = sleepers
    heard = Heard()
    io = NodeIO(heard)
    io.start()
    for sleeper in sleepers:
        io.watch(sleeper.child)
    control_channel.send(first.theirs, {"op": "bad"})
    assert heard.gone.get(timeout=WAIT_S) == "first"
    assert "no such operation" in heard.logged.get(timeout=WAIT_S)
    control_channel.send(second.theirs, {"op": "good"})
    assert heard.said.get(timeout=WAIT_S) == "second"
    io.stop()


def test_killing_a_child_that_is_gone_touches_nobody(sleepers: list[Sleeper]) -> None:
    first, second = sleepers
    number = first.child.pidfd
    first.child.close()
    reused = os.dup(second.child.pidfd)  # the lowest free numbers: one is the closed pidfd's
    others = [os.dup(second.child.pidfd) for _ in range(3)]
    assert number in {reused, *others}
    first.child.kill()
    assert not first.child.send({"op": "stop"})
    assert second.process.poll() is None
    for fd in (reused, *others):
        os.close(fd)


def test_a_word_that_must_not_wait_is_dropped_where_a_child_does_not_read(
    sleepers: list[Sleeper],
) -> None:
    sleeper, _ = sleepers
    word = {"op": "lease", "attempt": 1, "until": 1.0}
    sent: list[bool] = []

    def send() -> None:
        while not sent or sent[-1]:
            sent.append(sleeper.child.send(word, wait=False))

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    sender.join(WAIT_S)
    assert not sender.is_alive(), "it waits for a child that does not read"
    for _ in sent[:-1]:
        assert control_channel.receive(sleeper.theirs) == word
    assert sleeper.child.send(word, wait=False)


def started_link() -> tuple[socket.socket, Link]:
    ours, theirs = control_channel.pair()
    OPEN.append(ours)
    link = Link(theirs, FaultPoints(None))
    link.start()
    return ours, link


def test_a_late_word_for_an_older_attempt_does_not_replace_the_present_one() -> None:
    ours, link = started_link()
    for attempt, step in ((6, 60), (5, 99)):
        control_channel.send(
            ours, {"op": "state", "attempt": attempt, "ok": attempt == 6, "message": ""}
        )
        control_channel.send(ours, {"op": "replicated", "attempt": attempt, "step": step})
    assert link.wait_replicated(6, 60, WAIT_S) == 60
    assert link.wait_state(6, WAIT_S)["ok"]
    # what the partner before held says nothing of the next one
    control_channel.send(ours, {"op": "partner", "attempt": 6, "present": True})
    eventually(lambda: link.wait_replicated(6, 60, 0.01) == -1, WAIT_S)


def test_a_partner_that_failed_is_not_waited_for_until_it_holds_a_step_again() -> None:
    ours, link = started_link()
    assert link.enter(6, has_partner=True)
    told = [{"op": "partner", "attempt": 6, "present": False}]
    told += [{"op": "replicated", "attempt": 6, "step": 50}]
    for message, answer in zip(told, (60, 50), strict=True):
        control_channel.send(ours, message)
        eventually(lambda wanted=answer: link.wait_replicated(6, 60, 0.01) == wanted, WAIT_S)


def test_an_attempt_that_was_fenced_before_it_began_is_not_entered() -> None:
    ours, link = started_link()
    control_channel.send(ours, {"op": "fence", "attempt": 3})
    assert link.next_order()["op"] == "fence"
    assert not link.enter(2, has_partner=True)
    assert link.enter(3, has_partner=True)


def test_a_fence_ends_a_delivery_for_an_older_attempt(tmp_path: Path) -> None:
    """The source stalls in the middle: the fence does not wait for its patience."""
    layout = StateLayout((TensorEntry("w", "uint8", (64,), (0,), (64,), 0, 64),), 64)
    here = SegmentStore(tmp_path / "here", "tp=1")
    there = SegmentStore(tmp_path / "there", "tp=1")
    source = there.ensure(0, Place.OWN, layout)
    source.begin(5)[:] = bytes(64)
    digest = source.commit(attempt=1, step=5, digest="0" * 32).digest
    stalled, resume = threading.Event(), threading.Event()

    class Stalling(SegmentStore):
        def find(self, rank: int, place: Place) -> Segment | None:
            stalled.set()
            resume.wait(WAIT_S)
            return super().find(rank, place)

    server = DataServer(Stalling(tmp_path / "there", "tp=1"), SECRET, "127.0.0.1")
    restore = Restore(Tier.PARTNER_RAM, 5, 1, digest, "n1", Place.OWN, "127.0.0.1", server.port)
    courier = Courier("n0", SECRET, WAIT_S)
    failed: queue.Queue[Exception] = queue.Queue()

    def bring() -> None:
        try:
            courier.bring(2, 0, restore, here, {})
        except Exception as error:
            failed.put(error)

    threading.Thread(target=bring, daemon=True).start()
    assert stalled.wait(WAIT_S)
    began = time.monotonic()
    courier.fence(3)
    assert time.monotonic() - began < WAIT_S / 5
    assert isinstance(failed.get(timeout=WAIT_S), SourceLost)
    resume.set()
    with pytest.raises(StaleCommand):
        courier.bring(2, 0, restore, here, {})
    server.close()


def test_a_long_error_in_any_letters_fits_into_a_message() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for letter in ("é", "\x00", "\U0001f600", "\udc80"):
        text = control_channel.shortened(letter * 100_000)
        control_channel.send(left, {"op": "failed", "message": text, "traceback": text})
        assert control_channel.receive(right)["message"] == text
