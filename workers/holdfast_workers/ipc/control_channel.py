"""The local protocol between a node agent and the processes forked for it.

One `SOCK_SEQPACKET` socket pair per process: a message is one document of `protocol/codec.py`, sent
and received atomically, and end-of-file on the socket means that the other process has ended. The
messages are those of `protocol/processes.py`. A message that grows with the world may be too long
for the socket: it lies in a memory file then, whose descriptor is sent in its place.
"""

from __future__ import annotations

import array
import os
import socket
from typing import TypeVar

from holdfast_workers.errors import WorkersError
from holdfast_workers.protocol import codec

Message = TypeVar("Message")

THREAD_NAME = "hf-control"
"""Name of the worker thread that reads and answers control messages."""

MAX_PACKET_BYTES = 128 * 1024
"""Longest message that is sent as it is."""
MAX_MESSAGE_BYTES = 64 << 20
_IN_FILE = b"\0in a memory file"
"""The packet in place of a long message; no document begins with a NUL."""
_MAX_FDS = 8
MAX_TEXT = 8 * 1024
"""Characters. A message can hold two texts of this length even if each character takes six
bytes."""


class ControlClosed(WorkersError):
    """The process at the other side of a control socket has ended."""


def pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair of control sockets; neither is inherited by an exec."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (left, right):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_PACKET_BYTES)
    return left, right


def send(
    end: socket.socket, message: object, fds: tuple[int, ...] = (), *, wait: bool = True
) -> None:
    """Send one message and, with it, the open file descriptors `fds`.

    Raises ControlClosed if the other process has ended, ValueError if the message is too long, and,
    without `wait`, BlockingIOError if the socket buffer is full of unread messages.
    """
    raw = codec.encode(message)
    if len(raw) > MAX_MESSAGE_BYTES:
        raise ValueError(f"control message of {len(raw)} bytes exceeds {MAX_MESSAGE_BYTES}")
    if len(raw) <= MAX_PACKET_BYTES:
        _send_packet(end, raw, fds, wait=wait)
        return
    file = _memory_file(raw)
    try:
        _send_packet(end, _IN_FILE, (*fds, file), wait=wait)
    finally:
        os.close(file)


def _send_packet(end: socket.socket, raw: bytes, fds: tuple[int, ...], *, wait: bool) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        end.sendmsg([raw], rights, 0 if wait else socket.MSG_DONTWAIT)
    except OSError as error:
        if isinstance(error, BlockingIOError) and not wait:
            raise
        raise ControlClosed(str(error)) from error


def _memory_file(raw: bytes) -> int:
    file = os.memfd_create("control-message", os.MFD_CLOEXEC)
    try:
        view = memoryview(raw)
        while view:
            view = view[os.write(file, view) :]
    except BaseException:
        os.close(file)
        raise
    return file


def _read_memory_file(file: int) -> bytes:
    """Raises ValueError for a file that is too long."""
    size = os.fstat(file).st_size
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"control message of {size} bytes exceeds {MAX_MESSAGE_BYTES}")
    raw = b""
    while piece := os.pread(file, size - len(raw), len(raw)):
        raw += piece
    return raw


def receive(end: socket.socket, *kinds: type[Message]) -> Message:
    """The next message, of one of `kinds`.

    Raises ControlClosed at end-of-file, TimeoutError after the timeout, UnreadableDocument."""
    return receive_with_fds(end, *kinds)[0]


def receive_with_fds(end: socket.socket, *kinds: type[Message]) -> tuple[Message, list[int]]:
    """The next message and the file descriptors sent with it."""
    try:
        raw, fds, _flags, _address = socket.recv_fds(end, MAX_PACKET_BYTES, _MAX_FDS)
    except (TimeoutError, BlockingIOError):
        raise
    except OSError as error:
        raise ControlClosed(str(error)) from error
    try:
        if not raw:
            raise ControlClosed("end of control socket")
        if raw == _IN_FILE:
            file = fds.pop()
            try:
                raw = _read_memory_file(file)
            finally:
                os.close(file)
        return codec.decode(raw, *kinds), fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def shorten_middle(text: str) -> str:
    """`text` with its middle left out, so that it fits into a message: both ends matter most."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
