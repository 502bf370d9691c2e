"""The agent's handle of its node's rendezvous store: forks it, and again whenever it ends."""

from __future__ import annotations

import threading
import time

from holdfast_workers.ipc.children import ChildProcesses
from holdfast_workers.ipc.io_loop import NodeIO

RETRY_S = 1.0
"""A store that ended sooner than this after its start is forked again after this pause."""


class Rendezvous:
    """Thread-safe. Process groups that are formed need no store; an attempt that begins after a
    store's end uses the port of the next store."""

    def __init__(
        self, child_processes: ChildProcesses, host: str, closing: threading.Event
    ) -> None:
        self._child_processes = child_processes
        self._host = host
        self._closing = closing
        self._changed = threading.Condition()
        self._port = 0
        self._forked_at = 0.0

    @property
    def port(self) -> int:
        """0 while no store is running."""
        return self._port

    def fork(self, io: NodeIO) -> None:
        self._forked_at = time.monotonic()
        io.watch(self._child_processes.fork("store", "store", {"host": self._host}))

    def fork_again(self, io: NodeIO) -> None:
        if time.monotonic() - self._forked_at < RETRY_S:
            self._closing.wait(RETRY_S)
        if not self._closing.is_set():
            self.fork(io)

    def record_port(self, port: int) -> None:
        """Record the port that the store's process reported; 0: the process has ended."""
        with self._changed:
            self._port = port
            self._changed.notify_all()

    def wait_running(self, timeout_s: float) -> bool:
        """Wait until a store is running. False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._port > 0, timeout_s)
