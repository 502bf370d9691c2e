"""The agent's side of lifelines: sends heartbeats to its peers and receives their lease grants.

Runs in the data server's thread, which calls `beat_if_due` and `receive`. `add` may be called from
any thread.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast_workers.memory.wire import NOT_READY, RECORD_BYTES
from holdfast_workers.protocol.lease import GRANT_BYTES, Grant, clock_s, encode_beat


@dataclass(eq=False)
class HeldLifeline:
    """One lifeline that a peer holds to this agent."""

    sock: socket.socket
    received: bytearray = field(default_factory=bytearray)
    """The bytes of an incomplete grant."""
    epoch: int = 0
    """Epoch of the supervisor that grants on this line; 0 before its first grant."""


class HeartbeatSender:
    """Sends a beat on every lifeline each `beat_s` seconds.

    `on_grant(grant)` is called for every grant, `on_end(epoch)` when the last lifeline ends on
    which the supervisor of that epoch has granted. The end of a connection proves nothing about the
    supervisor's process. Both run in the data server's thread and must not block."""

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
        self._held: list[HeldLifeline] = []
        self._next = time.monotonic() + beat_s

    def add(self, sock: socket.socket) -> None:
        """Beat on this connection from now on. It is closed when the peer ends, or by `close`."""
        sock.setblocking(False)
        sock.send(encode_beat(clock_s()))
        with self._lock:
            self._new.append(sock)

    def next_beat_in_s(self) -> float:
        """Seconds until the next beat is due."""
        return max(0.0, self._next - time.monotonic())

    def beat_if_due(self) -> None:
        """Register new lifelines; send a beat on all lines if it is due."""
        with self._lock:
            new, self._new = self._new, []
        for sock in new:
            line = HeldLifeline(sock)
            self._held.append(line)
            self._selector.register(sock, selectors.EVENT_READ, line)
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._beat_s
        for line in tuple(self._held):
            try:
                line.sock.send(encode_beat(clock_s()))
            except NOT_READY:
                pass  # its receive buffer is full: it reads nothing and grants nothing
            except OSError:
                self._drop(line)

    def receive(self, line: HeldLifeline) -> None:
        """Read from a lifeline: grants, or its end."""
        try:
            piece = line.sock.recv(RECORD_BYTES)
        except NOT_READY:
            return
        except OSError:
            piece = b""
        if not piece:
            self._drop(line)
            return
        line.received += piece
        whole = len(line.received) // GRANT_BYTES * GRANT_BYTES
        for start in range(0, whole, GRANT_BYTES):
            grant = Grant.unpack(bytes(line.received[start : start + GRANT_BYTES]))
            line.epoch = grant.epoch
            self._on_grant(grant)
        del line.received[:whole]

    def close(self) -> None:
        for line in tuple(self._held):
            self._close(line)
        for sock in self._new:
            sock.close()

    def _drop(self, line: HeldLifeline) -> None:
        self._close(line)
        if line.epoch and not any(other.epoch >= line.epoch for other in self._held):
            self._on_end(line.epoch)  # not if the supervisor has a newer line

    def _close(self, line: HeldLifeline) -> None:
        self._held.remove(line)
        with contextlib.suppress(KeyError, ValueError):  # the selector is closed already
            self._selector.unregister(line.sock)
        line.sock.close()
