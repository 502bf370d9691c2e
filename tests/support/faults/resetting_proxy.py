"""A TCP proxy that resets connections, like a firewall or a load balancer on the path.

Both sides of a reset connection receive RST, although both processes live.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading

_PIECE = 1 << 16
_TICK_S = 0.05
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)
CONNECT_S = 60.0


class ResettingProxy:
    """Forwards to `upstream_port` of this host from `port`. While `refuses` is set, every new
    connection is reset too."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream = ("127.0.0.1", upstream_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.refuses = False
        self.resets = 0
        """Number of connections that were reset."""
        self._peers: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="resetting-proxy", daemon=True)
        self._thread.start()

    def reset(self) -> None:
        """Reset every connection."""
        with self._lock:
            for sock in tuple(self._peers):
                self._reset(sock)

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self.reset()
        self._listener.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._forward(key.fileobj)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        with self._lock:
            try:
                server = socket.create_connection(self._upstream, CONNECT_S)
            except OSError:  # the upstream process has ended
                server = socket.socket()
            self._peers |= {client: server, server: client}
            if self.refuses or server.getsockname()[1] == 0:
                self._reset(client)
                return
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._selector.register(sock, selectors.EVENT_READ)

    def _forward(self, source: socket.socket) -> None:
        with self._lock:
            target = self._peers.get(source)
            if target is None:
                return  # reset meanwhile
            try:
                piece = source.recv(_PIECE)
                if piece:
                    target.sendall(piece)
                    return
            except OSError:
                pass
            self._reset(source, hard=False)

    def _reset(self, sock: socket.socket, *, hard: bool = True) -> None:
        """Close a connection on both sides: with RST, or in order."""
        other = self._peers.pop(sock, None)
        if other is None:
            return
        del self._peers[other]
        self.resets += hard
        for end in (sock, other):
            with contextlib.suppress(KeyError):
                self._selector.unregister(end)
            if hard:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
            end.close()
