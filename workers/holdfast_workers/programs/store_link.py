"""A connection to the rendezvous store of an attempt, which shows when the store has ended.

Ranks that have not met by then wait for it for minutes. Nothing is sent over the connection.
"""

from __future__ import annotations

import contextlib
import socket

from holdfast_workers.errors import WorkersError

CONNECT_S = 5.0
"""How long the store's node may take to answer."""
MEETING_S = 1800.0
"""How long ranks that never show a step may take to meet: the default time-out of torch's process
groups. Later, the store's end is none of the program's."""


class StoreEnded(WorkersError):
    """The store of an attempt does not listen any more."""


def connect(host: str, port: int) -> socket.socket:
    """Raises StoreEnded."""
    try:
        return socket.create_connection((host, port), CONNECT_S)
    except OSError as error:
        raise StoreEnded(f"no rendezvous store listens on {host}:{port}: {error}") from error


def has_ended(link: socket.socket) -> bool:
    """Whether the store has closed the readable connection."""
    with contextlib.suppress(OSError):  # reset
        return not link.recv(1)
    return True
