"""The local protocol between a node agent and the processes forked for it.

One `SOCK_SEQPACKET` socket pair per process: a message is one document of `protocol/codec.py`, sent
and received atomically, and end-of-file on the socket means that the other process has ended. The
messages are those of `protocol/processes.py`.
"""

from __future__ import annotations

import array
import socket
from typing import TypeVar

from holdfast_workers.errors import WorkersError
from holdfast_workers.protocol import codec

Message = TypeVar("Message")

THREAD_NAME = "hf-control"
"""Name of the worker thread that reads and answers control messages."""

MAX_MESSAGE_BYTES = 128 * 1024
MAX_TEXT = 8 * 1024
"""Characters. A message can hold two texts of this length even if each character takes six
bytes."""


class ControlClosed(WorkersError):
    """The process at the other side of a control socket has ended."""


def pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair of control sockets; neither is inherited by an exec."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (left, right):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_MESSAGE_BYTES)
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
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        end.sendmsg([raw], rights, 0 if wait else socket.MSG_DONTWAIT)
    except OSError as error:
        if isinstance(error, BlockingIOError) and not wait:
            raise
        raise ControlClosed(str(error)) from error


def receive(end: socket.socket, *kinds: type[Message]) -> Message:
    """The next message, of one of `kinds`.

    Raises ControlClosed at end-of-file, TimeoutError after the timeout, UnreadableDocument."""
    return receive_with_fds(end, *kinds)[0]


def receive_with_fds(end: socket.socket, *kinds: type[Message]) -> tuple[Message, list[int]]:
    """The next message and the file descriptors sent with it."""
    try:
        raw, fds, _flags, _address = socket.recv_fds(end, MAX_MESSAGE_BYTES, 8)
    except (TimeoutError, BlockingIOError):
        raise
    except OSError as error:
        raise ControlClosed(str(error)) from error
    if not raw:
        raise ControlClosed("end of control socket")
    return codec.decode(raw, *kinds), fds


def shorten_middle(text: str) -> str:
    """`text` with its middle left out, so that it fits into a message: both ends matter most."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
