"""Control messages of any length over a real socket pair: whole, in order, without a leak."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Container, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast_workers.ipc import control_channel
from holdfast_workers.ipc.control_channel import MAX_MESSAGE_BYTES, MAX_PACKET_BYTES, ControlClosed
from holdfast_workers.protocol.codec import UnreadableDocument
from holdfast_workers.protocol.processes import StepDigest, WorkerSignal
from holdfast_workers.protocol.signals import StepRecomputed


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = control_channel.pair()
    theirs.settimeout(60)
    yield ours, theirs
    ours.close()
    theirs.close()


def recomputed(ranks: int) -> WorkerSignal:
    return WorkerSignal(1, 0, StepRecomputed(7, tuple(f"{rank:032x}" for rank in range(ranks))))


LONG_MESSAGE = "/memfd:control-message (deleted)"
"""What `open_files` calls the file of a long message."""


def open_files(names: Container[str]) -> list[str]:
    """Those of these files that the process has open. Files of other tests come and go."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.append(str(path.readlink()))
    return [name for name in found if name in names]


def name_of(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


@pytest.mark.parametrize("ranks", [1, 4096, 65_536])
def test_a_message_with_a_value_of_each_rank_arrives_whole(
    pair: tuple[socket.socket, socket.socket], ranks: int
) -> None:
    ours, theirs = pair
    control_channel.send(ours, recomputed(ranks))
    control_channel.send(ours, StepDigest(8, "after"))
    assert control_channel.receive(theirs, WorkerSignal) == recomputed(ranks)
    assert control_channel.receive(theirs, StepDigest) == StepDigest(8, "after")


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(0, 4 * MAX_PACKET_BYTES), min_size=1, max_size=6))
def test_messages_arrive_in_order_however_long_they_are(
    pair: tuple[socket.socket, socket.socket], lengths: list[int]
) -> None:
    ours, theirs = pair
    sent = [StepDigest(at, "x" * length) for at, length in enumerate(lengths)]

    def send_all() -> None:
        for message in sent:
            control_channel.send(ours, message)

    sender = threading.Thread(target=send_all)
    sender.start()
    assert [control_channel.receive(theirs, StepDigest) for _ in sent] == sent
    sender.join()


def test_descriptors_come_with_a_long_message_and_none_is_left_open(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    names = {LONG_MESSAGE}
    for _ in range(300):
        reader, writer = os.pipe()
        names.add(name_of(reader))
        control_channel.send(ours, recomputed(4096), (reader,))
        os.close(reader)
        message, (passed,) = control_channel.receive_with_fds(theirs, WorkerSignal)
        assert message == recomputed(4096)
        os.write(writer, b"!")
        assert os.read(passed, 1) == b"!"
        os.close(passed)
        os.close(writer)
    assert open_files(names) == []


def test_a_message_that_cannot_be_read_leaves_no_descriptor(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    for length in (10, 2 * MAX_PACKET_BYTES):
        control_channel.send(ours, StepDigest(1, "x" * length), (ours.fileno(),))
        with pytest.raises(UnreadableDocument):
            control_channel.receive_with_fds(theirs, WorkerSignal)
    name = name_of(ours.fileno())
    assert open_files({name, LONG_MESSAGE}) == [name]


def test_a_message_beyond_every_limit_is_refused_before_it_is_sent(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    with pytest.raises(ValueError, match=f"exceeds {MAX_MESSAGE_BYTES}"):
        control_channel.send(ours, StepDigest(1, "x" * MAX_MESSAGE_BYTES))
    control_channel.send(ours, StepDigest(2, "next"))
    assert control_channel.receive(theirs, StepDigest).step == 2


def test_a_full_buffer_refuses_a_long_message_and_a_closed_peer_ends_the_channel(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    with pytest.raises(BlockingIOError):
        while True:
            control_channel.send(ours, StepDigest(1, "x" * MAX_PACKET_BYTES), wait=False)
    assert open_files({LONG_MESSAGE}) == []
    theirs.close()
    with pytest.raises(ControlClosed):
        control_channel.send(ours, recomputed(4096))
