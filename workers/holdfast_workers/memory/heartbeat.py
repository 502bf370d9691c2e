"""The agent's end of lifelines: beats to whoever holds one, and hears what they grant.

Owned by the data server's thread, which calls `beat` and `hear`; `hold` may be called by any.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast_workers.protocol.lease import GRANT_BYTES, Grant, beat, clock_s

_READ_BYTES = 4096
_ENDED = (errno.ECONNRESET, errno.EPIPE)
"""Only the peer's own kernel says so; a network's errors prove nothing."""


@dataclass(eq=False)
class Held:
    """One lifeline, and what has come of a grant that is not whole yet."""

    sock: socket.socket
    received: bytearray = field(default_factory=bytearray)
    epoch: int = 0
    """Of the supervisor that grants on it, once it has."""


class Heart:
    """`on_grant(grant)`, and `on_end(epoch)` when a lifeline ends on which that supervisor has
    granted, are called in the data server's thread, and must not block."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        beat_s: float,
        on_grant: Callable[[Grant], None],
        on_end: Callable[[int], None],
    ) -> None:
        self._selector = selector
        self._beat_s = beat_s
        self._on_grant = on_grant
        self._on_end = on_end
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
            except BlockingIOError:
                pass  # its end of the connection is full: it hears nothing, and grants nothing
            except OSError as error:
                self._beat_failed(one, error)

    def hear(self, one: Held) -> None:
        """Something has come on a lifeline: grants, or its end."""
        try:
            piece = one.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(one, ended=error.errno in _ENDED)
            return
        if not piece:
            self._drop(one, ended=True)
            return
        one.received += piece
        whole = len(one.received) // GRANT_BYTES * GRANT_BYTES
        for start in range(0, whole, GRANT_BYTES):
            grant = Grant.unpack(bytes(one.received[start : start + GRANT_BYTES]))
            one.epoch = grant.epoch
            self._on_grant(grant)
        del one.received[:whole]

    def close(self) -> None:
        for one in tuple(self._held):
            self._drop(one)
        for sock in self._new:
            sock.close()

    def _beat_failed(self, one: Held, error: OSError) -> None:
        """What it said before is to be read first: an end that was announced is none of the
        supervisor's."""
        if error.errno in _ENDED:
            self.hear(one)
        if one in self._held:
            self._drop(one, ended=error.errno in _ENDED)

    def _drop(self, one: Held, *, ended: bool = False) -> None:
        self._held.remove(one)
        with contextlib.suppress(KeyError, ValueError):  # the selector is closed already
            self._selector.unregister(one.sock)
        one.sock.close()
        if ended and one.epoch and not any(other.epoch >= one.epoch for other in self._held):
            self._on_end(one.epoch)  # not of a former line of a supervisor that has another now
