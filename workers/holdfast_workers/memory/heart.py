"""The agent's end of lifelines: beats to whoever holds one, and hears what they grant.

Owned by the data server's thread, which calls `beat` and `hear`; `hold` may be called by any.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast_workers.lease import GRANT_BYTES, Grant, beat, clock_s

_READ_BYTES = 4096


@dataclass(eq=False)
class Held:
    """One lifeline, and what has come of a grant that is not whole yet."""

    sock: socket.socket
    received: bytearray = field(default_factory=bytearray)


class Heart:
    """`on_grant` is called in the data server's thread, and must not block."""

    def __init__(
        self, selector: selectors.BaseSelector, beat_s: float, on_grant: Callable[[Grant], None]
    ) -> None:
        self._selector = selector
        self._beat_s = beat_s
        self._on_grant = on_grant
        self._lock = threading.Lock()
        self._new: list[socket.socket] = []
        self._held: list[Held] = []
        self._next = time.monotonic() + beat_s

    def hold(self, sock: socket.socket) -> None:
        """Beat on this connection from now on; it is closed with its peer's end, or by `close`."""
        sock.setblocking(False)
        sock.send(beat(clock_s()))
        with self._lock:
            self._new.append(sock)

    def patience_s(self) -> float:
        """How long the next beat can wait."""
        return max(0.0, self._next - time.monotonic())

    def beat(self) -> None:
        """Take in new lifelines; beat on all of them when it is time."""
        with self._lock:
            new, self._new = self._new, []
        for sock in new:
            one = Held(sock)
            self._held.append(one)
            self._selector.register(sock, selectors.EVENT_READ, one)
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._beat_s
        for one in tuple(self._held):
            try:
                one.sock.send(beat(clock_s()))
            except OSError:  # gone, or so far behind that it takes us for dead already
                self._drop(one)

    def hear(self, one: Held) -> None:
        """Something has come on a lifeline: grants, or its end."""
        try:
            piece = one.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self._drop(one)
            return
        one.received += piece
        whole = len(one.received) // GRANT_BYTES * GRANT_BYTES
        for start in range(0, whole, GRANT_BYTES):
            self._on_grant(Grant.unpack(bytes(one.received[start : start + GRANT_BYTES])))
        del one.received[:whole]

    def close(self) -> None:
        for one in tuple(self._held):
            self._drop(one)
        for sock in self._new:
            sock.close()

    def _drop(self, one: Held) -> None:
        self._held.remove(one)
        with contextlib.suppress(KeyError, ValueError):  # the selector is closed already
            self._selector.unregister(one.sock)
        one.sock.close()
