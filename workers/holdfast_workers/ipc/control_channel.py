"""The local protocol between a node agent and the processes forked for it.

One `SOCK_SEQPACKET` socket pair per process: a message is one JSON object, atomically sent and
received, and the end of the socket says that the other side is gone. Nothing here is ever
unpickled. Operations (`op`) of the agent: `join`, `fence`, `state`, `replicated`, `partner`,
`finish`, `intervals`, `lease`, `inject`, `stop`; of a worker: `hello`, `wanted`, `joined`,
`committed`, `row`, `tripped`, `digest`, `save`, `failed`, `injected`, `parked`, `done`; of a store
host: `port`; of a saver: `saved`.
"""

from __future__ import annotations

import array
import json
import socket
from typing import Any

from holdfast_workers.errors import WorkersError

THREAD = "hf-control"
"""Name of the thread of a worker that answers."""

MAX_MESSAGE_BYTES = 128 * 1024
MAX_TEXT = 8 * 1024
"""Characters. A message holds two such texts, also where each character takes six bytes."""


class ControlClosed(WorkersError):
    """The other side of a control socket is gone."""


def pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair of control sockets, neither inherited by an exec."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (left, right):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_MESSAGE_BYTES)
    return left, right


def send(
    end: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = (), *, wait: bool = True
) -> None:
    """Send one message, with open file descriptors if any are given.

    Raises ControlClosed if the other side is gone, ValueError if the message is too long, and,
    unless it may `wait`, BlockingIOError if the other side has left too much unread.
    """
    text = json.dumps(message, separators=(",", ":"), ensure_ascii=False)
    raw = text.encode(errors="backslashreplace")  # half a surrogate pair, as JSON escapes it
    if len(raw) > MAX_MESSAGE_BYTES:
        raise ValueError(f"control message of {len(raw)} bytes exceeds {MAX_MESSAGE_BYTES}")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        end.sendmsg([raw], rights, 0 if wait else socket.MSG_DONTWAIT)
    except OSError as error:
        if isinstance(error, BlockingIOError) and not wait:
            raise
        raise ControlClosed(str(error)) from error


def receive(end: socket.socket) -> dict[str, Any]:
    """The next message. Raises ControlClosed at the end, TimeoutError past the socket's timeout."""
    return receive_with_fds(end)[0]


def receive_with_fds(end: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message and the file descriptors that came with it."""
    try:
        raw, fds, _flags, _address = socket.recv_fds(end, MAX_MESSAGE_BYTES, 8)
    except (TimeoutError, BlockingIOError):
        raise
    except OSError as error:
        raise ControlClosed(str(error)) from error
    if not raw:
        raise ControlClosed("end of control socket")
    message: dict[str, Any] = json.loads(raw)
    return message, fds


def shortened(text: str) -> str:
    """`text` cut in the middle so that it fits into a message: its ends say the most."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
