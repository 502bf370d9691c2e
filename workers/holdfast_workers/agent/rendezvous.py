"""A node's rendezvous store, as its agent has it: forked, and forked again whenever it ends."""

from __future__ import annotations

import threading
import time

from holdfast_workers.ipc.children import Brood
from holdfast_workers.ipc.io_loop import NodeIO

RETRY_S = 1.0
"""One that ends sooner after its start is forked again only after as long."""


class Rendezvous:
    """Thread-safe. Formed groups need no store; attempts after its end use the next one's port."""

    def __init__(self, brood: Brood, host: str, closing: threading.Event) -> None:
        self._brood = brood
        self._host = host
        self._closing = closing
        self._changed = threading.Condition()
        self._port = 0
        self._forked_at = 0.0

    @property
    def port(self) -> int:
        """0: there is none just now."""
        return self._port

    def fork(self, io: NodeIO) -> None:
        self._forked_at = time.monotonic()
        io.watch(self._brood.fork("store", "store", {"host": self._host}))

    def fork_again(self, io: NodeIO) -> None:
        if time.monotonic() - self._forked_at < RETRY_S:
            self._closing.wait(RETRY_S)
        if not self._closing.is_set():
            self.fork(io)

    def listens(self, port: int) -> None:
        """The process has said so; 0: it has ended."""
        with self._changed:
            self._port = port
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Until there is one."""
        with self._changed:
            return self._changed.wait_for(lambda: self._port > 0, timeout_s)
