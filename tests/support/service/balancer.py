"""A TCP load balancer before servers that come and go."""

from __future__ import annotations

import contextlib
import itertools
import socket
import socketserver
import threading
from collections.abc import Sequence

_PIECE = 1 << 16
CONNECT_S = 60.0


class Balancer:
    """Each connection goes to the next server that accepts it; it ends when that server ends."""

    def __init__(self, ports: Sequence[int]) -> None:
        """`ports`: of the servers, on this host."""
        turns = itertools.count()

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                first = next(turns)
                for turn in range(len(ports)):
                    upstream = ("127.0.0.1", ports[(first + turn) % len(ports)])
                    with contextlib.suppress(ConnectionError, TimeoutError):
                        server = socket.create_connection(upstream, CONNECT_S)
                        server.settimeout(None)
                        _forward(self.request, server)
                        return

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _forward(client: socket.socket, server: socket.socket) -> None:
    back = threading.Thread(target=_copy, args=(server, client), daemon=True)
    back.start()
    _copy(client, server)
    back.join()
    server.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Until either end closes; both are then shut down."""
    with contextlib.suppress(OSError):
        while piece := source.recv(_PIECE):
            target.sendall(piece)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
