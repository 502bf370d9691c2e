"""Faults of child processes: the I/O thread survives them, and late messages change nothing."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.waiting import eventually

from holdfast_workers.errors import StaleCommand
from holdfast_workers.fault_injection.fault_points import FaultPoints
from holdfast_workers.ipc import control_channel, line_budget
from holdfast_workers.ipc.children import Child
from holdfast_workers.ipc.io_loop import NodeIO
from holdfast_workers.ipc.line_budget import LeftOut
from holdfast_workers.ipc.linux_processes import ProcessEnd
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.fetch import SourceLost
from holdfast_workers.memory.segment import Segment
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.memory.state_delivery import StateDelivery
from holdfast_workers.protocol.answers import AgentFailure
from holdfast_workers.protocol.messages import Place, Restore, Tier
from holdfast_workers.protocol.processes import (
    FaultFired,
    LeaseUpdate,
    LeaveAttempts,
    PartnerPresence,
    StateReply,
    StepReplicated,
    StopAfterStep,
    WorkerJob,
    WorkerMessage,
    WorkerSignal,
)
from holdfast_workers.protocol.signals import WorkerDone
from holdfast_workers.state.layout import StateLayout, TensorEntry
from holdfast_workers.worker.main import WorkerLink

WAIT_S = 60.0
OPEN: list[socket.socket] = []
"""The agent's ends of the links under test: a link ends its process when its socket closes."""
SECRET = b"s" * 32
BAD, GOOD = FaultFired(1), FaultFired(2)


class RecordingObserver:
    """Records what it receives, and raises for `BAD`."""

    def __init__(self) -> None:
        self.received: queue.Queue[str] = queue.Queue()
        self.logged: queue.Queue[str] = queue.Queue()
        self.exited: queue.Queue[str] = queue.Queue()

    def on_worker_message(self, name: str, message: WorkerMessage) -> None:
        if message == BAD:
            raise LookupError("no such operation")
        self.received.put(name)

    def on_child_message(self, child: Child, message: object) -> None: ...

    def on_child_log(self, child: Child, text: str | LeftOut) -> None:
        self.logged.put(str(text))

    def on_child_exit(self, child: Child, end: ProcessEnd) -> None:
        self.exited.put(child.name)

    def on_zygote_exit(self) -> None: ...


class Sleeper:
    """An idle process as a child; `theirs` is its end of the control socket."""

    def __init__(self, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
        )
        ours, self.theirs = control_channel.pair()
        log, self.log = os.pipe()
        os.set_blocking(log, False)
        pid = self.process.pid
        self.child = Child(WorkerJob(""), name, pid, os.pidfd_open(pid), ours, log)

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


def test_a_message_that_cannot_be_processed_ends_only_its_sender(
    sleepers: list[Sleeper],
) -> None:
    first, second = sleepers
    observer = RecordingObserver()
    io = NodeIO(observer)
    io.start()
    for sleeper in sleepers:
        io.watch(sleeper.child)
    control_channel.send(first.theirs, BAD)
    assert observer.exited.get(timeout=WAIT_S) == "first"
    assert "no such operation" in observer.logged.get(timeout=WAIT_S)
    control_channel.send(second.theirs, GOOD)
    assert observer.received.get(timeout=WAIT_S) == "second"
    io.stop()


def seen_to_its_end(sleeper: Sleeper) -> tuple[NodeIO, RecordingObserver]:
    """The loop that has seen a process print, be killed and end."""
    os.write(sleeper.log, b"a line\nlast words")
    sleeper.process.kill()
    os.waitid(os.P_PID, sleeper.process.pid, os.WEXITED | os.WNOWAIT)
    observer = RecordingObserver()
    io = NodeIO(observer)
    io.start()
    io.watch(sleeper.child)
    assert observer.exited.get(timeout=WAIT_S) == "first"
    return io, observer


def test_messages_and_output_are_passed_on_before_the_exit(sleepers: list[Sleeper]) -> None:
    sleeper, _ = sleepers
    for _ in range(3):
        control_channel.send(sleeper.theirs, GOOD)
    io, observer = seen_to_its_end(sleeper)
    assert [observer.received.get_nowait() for _ in range(3)] == ["first"] * 3
    assert [observer.logged.get_nowait() for _ in range(2)] == ["a line", "last words"]
    io.stop()


def test_a_message_that_cannot_be_processed_loses_no_output(sleepers: list[Sleeper]) -> None:
    sleeper, _ = sleepers
    control_channel.send(sleeper.theirs, BAD)
    io, observer = seen_to_its_end(sleeper)
    logged = [observer.logged.get_nowait() for _ in range(3)]
    assert [text for text in logged if "no such operation" not in text] == ["a line", "last words"]
    io.stop()


def test_lines_beyond_the_budget_are_logged_before_the_end_of_the_program_is_reported(
    sleepers: list[Sleeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_budget, "BURST_LINES", 0)
    sleeper, _ = sleepers
    observer = RecordingObserver()
    io = NodeIO(observer)
    io.start()
    os.write(sleeper.log, b"an error\n")
    control_channel.send(sleeper.theirs, WorkerSignal(1, 0, WorkerDone(1)))
    io.watch(sleeper.child)
    assert observer.received.get(timeout=WAIT_S) == "first"
    assert observer.logged.get_nowait() == "an error"
    io.stop()


def test_killing_an_exited_child_signals_no_other_process(sleepers: list[Sleeper]) -> None:
    first, second = sleepers
    number = first.child.pidfd
    first.child.close()
    reused = os.dup(second.child.pidfd)  # the lowest free numbers include that of the closed pidfd
    others = [os.dup(second.child.pidfd) for _ in range(3)]
    assert number in {reused, *others}
    first.child.kill()
    assert not first.child.send(StopAfterStep(1))
    with pytest.raises(subprocess.TimeoutExpired):  # a signal takes effect only some time later
        second.process.wait(timeout=0.5)
    for fd in (reused, *others):
        os.close(fd)


def test_a_lease_is_dropped_if_the_child_does_not_read_and_any_other_message_kills_it(
    sleepers: list[Sleeper],
) -> None:
    sleeper, _ = sleepers
    message = LeaseUpdate(1, 1.0, 1)
    sent: list[bool] = []

    def send() -> None:
        while not sent or sent[-1]:
            sent.append(sleeper.child.send(message, or_drop=True))

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    sender.join(WAIT_S)
    assert not sender.is_alive(), "send waits for a child that does not read"
    assert sleeper.process.poll() is None
    ender = threading.Thread(target=sleeper.child.send, args=(LeaveAttempts(2),), daemon=True)
    ender.start()
    ender.join(WAIT_S)
    assert not ender.is_alive(), "a fence waits for a child that does not read"
    assert sleeper.process.wait(WAIT_S) == -signal.SIGKILL
    assert sleeper.child.killed_because == "it did not read its control messages"
    for _ in sent[:-1]:
        assert control_channel.receive(sleeper.theirs, LeaseUpdate) == message


def started_link() -> tuple[socket.socket, WorkerLink]:
    ours, theirs = control_channel.pair()
    OPEN.append(ours)
    link = WorkerLink(theirs, FaultPoints(None))
    link.start()
    return ours, link


def test_a_late_message_for_an_older_attempt_does_not_replace_the_current_one() -> None:
    ours, link = started_link()
    for attempt, step in ((6, 60), (5, 99)):
        control_channel.send(ours, StateReply(attempt, "" if attempt == 6 else "late"))
        control_channel.send(ours, StepReplicated(attempt, step))
    control_channel.send(ours, LeaveAttempts(5))
    assert link.next_order() == LeaveAttempts(5), "all messages before it have been handled"
    assert link.wait_replicated(6, 60, WAIT_S) == 60
    assert not link.wait_state(6, WAIT_S).problem
    # What the former partner held says nothing about the next one.
    control_channel.send(ours, PartnerPresence(6, present=True))
    eventually(lambda: link.wait_replicated(6, 60, 0.01) == -1, WAIT_S)


def test_a_failed_partner_is_not_waited_for_until_it_holds_a_step_again() -> None:
    ours, link = started_link()
    assert link.enter(6, has_partner=True)
    messages = (PartnerPresence(6, present=False), StepReplicated(6, 50))
    for message, answer in zip(messages, (60, 50), strict=True):
        control_channel.send(ours, message)

        def answered(wanted: int = answer) -> bool:
            return link.wait_replicated(6, 60, 0.01) == wanted

        eventually(answered, WAIT_S)


def test_an_attempt_fenced_before_its_start_is_not_entered() -> None:
    ours, link = started_link()
    control_channel.send(ours, LeaveAttempts(3))
    assert link.next_order() == LeaveAttempts(3)
    assert not link.enter(2, has_partner=True)
    assert link.enter(3, has_partner=True)


def test_a_fence_ends_a_delivery_for_an_older_attempt(tmp_path: Path) -> None:
    """The source stalls during the transfer: the fence does not wait for the transfer's timeout."""
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
            resume.wait()
            return super().find(rank, place)

    server = DataServer(Stalling(tmp_path / "there", "tp=1"), SECRET, "127.0.0.1")
    restore = Restore(Tier.PARTNER_RAM, 5, 1, digest, "n1", Place.OWN, "127.0.0.1", server.port)
    delivery = StateDelivery("n0", SECRET, 600.0)
    failed: queue.Queue[Exception] = queue.Queue()

    def deliver() -> None:
        try:
            delivery.deliver(2, 0, restore, here, {})
        except Exception as error:
            failed.put(error)

    threading.Thread(target=deliver, daemon=True).start()
    assert stalled.wait(WAIT_S)
    delivery.fence(3)
    assert isinstance(failed.get(timeout=WAIT_S), SourceLost)
    resume.set()
    with pytest.raises(StaleCommand):
        delivery.deliver(2, 0, restore, here, {})
    server.close()


def test_a_long_error_in_any_script_fits_into_a_message() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for letter in ("é", "\x00", "\U0001f600", "\udc80"):
        text = control_channel.shorten_middle(letter * 100_000)
        failure = AgentFailure(text, "Error", text)
        control_channel.send(left, failure)
        # The codec replaces what is no text.
        assert control_channel.receive(right, AgentFailure).message == text.replace("\udc80", "?")
