"""The agent's handle of its node's rendezvous store: forks it, and again whenever it ends.

A port is passed on only of a store that has answered: its process may be dead or stopped before the
agent sees it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast_workers.ipc.children import Child, ChildProcesses
from holdfast_workers.ipc.io_loop import NodeIO
from holdfast_workers.protocol.processes import AskStorePort, StoreJob

RETRY_S = 1.0
"""A store that ended sooner than this after its start is forked again after this pause."""


class Rendezvous:
    """Thread-safe. Process groups that are formed need no store; an attempt that begins after a
    store's end uses the port of the next store. `on_lost(port)`: a store has ended."""

    def __init__(
        self,
        child_processes: ChildProcesses,
        job: StoreJob,
        closing: threading.Event,
        on_lost: Callable[[int], None],
    ) -> None:
        self._child_processes = child_processes
        self._job = job
        self._closing = closing
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._child: Child | None = None
        self._port = 0
        self._answers = 0
        self._attempt = 0
        self._wanted = 0
        self._forked_at = 0.0
        self.problem = ""
        """Why there has never been a store yet; "" once there was one."""

    @property
    def port(self) -> int:
        """0 while no store is running, or none for the attempt that was asked for last: that store
        is about to be closed."""
        return self._port if self._attempt >= self._wanted else 0

    def fork(self, io: NodeIO) -> None:
        self._forked_at = time.monotonic()
        child = self._child_processes.fork("store", self._job)
        with self._changed:
            self._child = child
        io.watch(child)

    def record_port(self, port: int, attempt: int = 0) -> None:
        """Record the answer of the store's process: the port on which it listens, and the attempt
        that the store is for, if it is for one. A process that started after the question is asked
        now."""
        with self._changed:
            self._port, self._attempt = port, attempt
            self._answers += 1
            self.problem = ""
            self._changed.notify_all()
            child = self._child if attempt < self._wanted else None
        if child is not None:
            child.send(AskStorePort(self._wanted))

    def record_problem(self, problem: str) -> None:
        """Record that the store's process found no port and ends."""
        if not self._answers:
            self.problem = problem

    def record_end(self) -> None:
        """Record the end of the store's process; `fork_again` replaces it."""
        with self._changed:
            port, self._port = self._port, 0
        if port and not self._closing.is_set():
            self._on_lost(port)

    def fork_again(self, io: NodeIO) -> None:
        if time.monotonic() - self._forked_at < RETRY_S:
            self._closing.wait(RETRY_S)
        if not self._closing.is_set():
            self.fork(io)

    def ask(self, attempt: int = 0) -> int:
        """Ask the store whether it answers; from now on none counts that is not for `attempt`, see
        `AskStorePort`. Returns the number of answers before this one."""
        with self._changed:
            self._wanted = max(self._wanted, attempt)
            child, before = self._child, self._answers
        if child is not None:
            child.send(AskStorePort(self._wanted))
        return before

    def wait_answer(self, timeout_s: float, attempt: int = 0) -> bool:
        """Ask, and wait for the answer. After `timeout_s`: False, and a store that is silent (it is
        stopped, or hangs) is killed."""
        child, before = self._child, self.ask(attempt)
        with self._changed:
            answered = self._changed.wait_for(
                lambda: self._answers > before and self.port > 0, timeout_s
            )
            if answered:
                return True
            silent = child if child is self._child else None  # a new one may still be starting
        if silent is not None:
            silent.kill()
            self.record_end()
        return False
