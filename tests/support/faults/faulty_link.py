"""A link between two agents that breaks where it is told to: after the n-th byte of a direction.

Both sides run the real client and server over it. A fault strikes the next connection only, so
what is tried again afterwards gets through.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum


class Way(StrEnum):
    UP = "from client to server"
    DOWN = "from server to client"


class Kind(StrEnum):
    CUT = "the connection ends"
    FLIP = "a bit changes"
    STALL = "nothing more comes"
    STRIKE = "something else happens"  # see `FaultyLink.on_strike`


@dataclass(frozen=True)
class Fault:
    """Before byte `at` of one direction. `bit` is the one that changes in it."""

    kind: Kind
    way: Way
    at: int
    bit: int = 0


@dataclass(eq=False)
class _End:
    """One side of a connection under way: what comes from it goes to `other`."""

    sock: socket.socket
    way: Way
    fault: Fault | None
    other: _End | None = None
    passed: int = 0
    stalled: bool = False


@dataclass
class FaultyLink:
    """Listens on `port` of this machine and carries to `target` until `close`."""

    target: int
    on_strike: Callable[[], None] = lambda: None
    fault: Fault | None = None
    fired: bool = False
    carried: dict[Way, bytearray] = field(default_factory=dict)
    """All of the last connection's bytes."""

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=16)
        self.port = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_reader, self._wake_writer = os.pipe()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def arm(self, fault: Fault | None) -> None:
        self.fault, self.fired = fault, False

    def close(self) -> None:
        self._closing = True
        os.write(self._wake_writer, b"!")
        self._thread.join(5)
        for end in (self._wake_reader, self._wake_writer):
            os.close(end)

    def _run(self) -> None:
        while not self._closing:
            for key, _events in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _End) and key.data.sock.fileno() >= 0:
                    self._carry(key.data)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _End):
                key.data.sock.close()
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        client = self._listener.accept()[0]
        try:
            server = socket.create_connection(("127.0.0.1", self.target), 2)
        except OSError:
            client.close()
            return
        fault, self.fault = self.fault, None
        up, down = _End(client, Way.UP, fault), _End(server, Way.DOWN, fault)
        up.other, down.other = down, up
        self.carried = {way: bytearray() for way in Way}
        for end in (up, down):
            end.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(end.sock, selectors.EVENT_READ, end)

    def _carry(self, end: _End) -> None:
        assert end.other is not None
        try:
            piece = bytearray(end.sock.recv(1 << 16))
            if not piece:
                self._end(end)
            elif self._goes_on(end, piece):
                self.carried[end.way] += piece
                end.passed += len(piece)
                end.other.sock.sendall(piece)
        except OSError:
            self._end(end)

    def _goes_on(self, end: _End, piece: bytearray) -> bool:
        """Let the fault strike if it lies in this piece; whether all of the piece passes."""
        fault = end.fault
        if end.stalled:
            return False
        at = fault.at - end.passed if fault is not None and fault.way is end.way else -1
        if fault is None or not 0 <= at < len(piece):
            return True
        self.fired = True
        if fault.kind is Kind.FLIP:
            piece[at] ^= 1 << fault.bit
            return True
        assert end.other is not None
        end.other.sock.sendall(piece[:at])
        if fault.kind is Kind.STALL:
            end.stalled = True
            return False
        if fault.kind is Kind.STRIKE:
            self.on_strike()
        self._end(end)
        return False

    def _end(self, end: _End) -> None:
        for one in (end, end.other):
            if one is not None and one.sock.fileno() >= 0:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(one.sock)
                one.sock.close()
