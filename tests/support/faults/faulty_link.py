"""A TCP link between two processes that fails: at a given byte of one direction, by a reset of all
its connections, or by refusing new ones.

Both sides run the real client and server over it. A fault at a byte applies to the next connection
only, so a retry succeeds. Of a reset both sides receive RST, although both live, as from a firewall
on the path.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
from dataclasses import dataclass, field
from enum import StrEnum

_RESET_AT_CLOSE = struct.pack("ii", 1, 0)


class Direction(StrEnum):
    """The direction in which bytes travel."""

    UP = "from client to server"
    DOWN = "from server to client"


class FaultType(StrEnum):
    """What happens at the byte of a fault."""

    CUT = "the connection ends"
    FLIP = "a bit changes"
    STALL = "nothing more comes"


@dataclass(frozen=True)
class Fault:
    """A fault before byte `at` of one direction. `bit`: the bit of that byte that `FLIP`
    inverts."""

    kind: FaultType
    way: Direction
    at: int
    bit: int = 0


@dataclass(eq=False)
class _End:
    """One side of an open connection: bytes received from it are forwarded to `other`."""

    sock: socket.socket
    way: Direction
    fault: Fault | None
    other: _End | None = None
    passed: int = 0
    stalled: bool = False


@dataclass
class FaultyLink:
    """Listens on `port` and forwards to port `target` of this machine until `close`."""

    target: int
    fault: Fault | None = None
    most_bytes: int = 1 << 16
    """It passes on so many bytes at once."""
    refuses: bool = False
    """New connections are reset, too."""
    resets: int = 0
    """Number of connections that were reset."""
    fired: bool = False
    forwarded: dict[Direction, bytearray] = field(default_factory=dict)
    """All bytes of the last connection, by direction."""

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=16)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_reader, self._wake_writer = os.pipe()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def arm(self, fault: Fault | None) -> None:
        self.fault, self.fired = fault, False

    def reset(self) -> None:
        """Reset every connection."""
        with self._lock:
            for end in self._ends():
                self._end(end, hard=True)

    def close(self) -> None:
        self._closing = True
        os.write(self._wake_writer, b"!")
        self._thread.join(60)
        for end in (self._wake_reader, self._wake_writer):
            os.close(end)

    def _ends(self) -> list[_End]:
        keys = list(self._selector.get_map().values())
        return [key.data for key in keys if isinstance(key.data, _End)]

    def _run(self) -> None:
        while not self._closing:
            for key, _events in self._selector.select():
                with self._lock:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.data, _End) and key.data.sock.fileno() >= 0:
                        self._carry(key.data)
        for end in self._ends():
            end.sock.close()
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        client = self._listener.accept()[0]
        server = None
        with contextlib.suppress(OSError):  # the server has ended
            server = socket.create_connection(("127.0.0.1", self.target), 60)
        fault, self.fault = self.fault, None
        up = _End(client, Direction.UP, fault)
        if server is not None:
            up.other = _End(server, Direction.DOWN, fault, up)
        if up.other is None or self.refuses:
            self._end(up, hard=True)
            return
        self.forwarded = {way: bytearray() for way in Direction}
        for end in (up, up.other):
            end.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(end.sock, selectors.EVENT_READ, end)

    def _carry(self, end: _End) -> None:
        assert end.other is not None
        try:
            piece = bytearray(end.sock.recv(1 << 16))
            if not piece:
                self._end(end)
            elif self._pass_or_fail(end, piece):
                self.forwarded[end.way] += piece
                end.passed += len(piece)
                for at in range(0, len(piece), self.most_bytes):
                    end.other.sock.sendall(piece[at : at + self.most_bytes])
        except OSError:
            self._end(end)

    def _pass_or_fail(self, end: _End, piece: bytearray) -> bool:
        """Apply the fault if it lies in `piece`. True if the whole piece is to be forwarded."""
        fault = end.fault
        if end.stalled:
            return False
        at = fault.at - end.passed if fault is not None and fault.way is end.way else -1
        if fault is None or not 0 <= at < len(piece):
            return True
        self.fired = True
        if fault.kind is FaultType.FLIP:
            piece[at] ^= 1 << fault.bit
            return True
        assert end.other is not None
        end.other.sock.sendall(piece[:at])
        if fault.kind is FaultType.STALL:
            end.stalled = True
            return False
        self._end(end)
        return False

    def _end(self, end: _End, *, hard: bool = False) -> None:
        """End a connection on both sides: in order, or with RST."""
        self.resets += hard and end.sock.fileno() >= 0
        for side in (end, end.other):
            if side is not None and side.sock.fileno() >= 0:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(side.sock)
                if hard:
                    side.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
                side.sock.close()
