"""Keeps a process on the node that brings the token sets of the job into the node's cache.

It has the bucket's credentials and runs no users' code. The ranks wait for the files by
themselves, so its death costs time only: another one takes its place. It is sent the window of
samples that the ranks read, which they show in their beacons (`progress_watch.py`), and the nodes
that may have the files already.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import structlog

from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.errors import WorkersError
from holdfast_workers.ipc.children import Child, ChildProcesses
from holdfast_workers.ipc.io_loop import NodeIO
from holdfast_workers.protocol.messages import Partner
from holdfast_workers.protocol.processes import FetcherJob, FetchOrder

AGAIN_S = 2.0
"""Least time between the starts of two of them."""

_log = structlog.get_logger()


class TokenFetching:
    """`fork` is called in background threads, the others in any thread; they never wait."""

    def __init__(
        self, config: AgentConfig, processes: ChildProcesses, closing: threading.Event
    ) -> None:
        self._config = config
        self._processes = processes
        self._closing = closing
        self._forked_at = 0.0
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._order = FetchOrder()
        self._known = self._order
        """The order that the process has."""

    def fork(self, io: NodeIO) -> None:
        """Start the process, in place of one that has ended."""
        config = self._config
        while not self._closing.wait(self._forked_at + AGAIN_S - time.monotonic()):
            self._forked_at = time.monotonic()
            job = FetcherJob(
                config.cache_dir, self._order, config.agent, config.secret, config.tls_dir
            )
            try:
                child = self._processes.fork("fetcher", job)
            except (WorkersError, OSError) as error:
                _log.warning("the fetch of the token sets did not start", why=str(error))
                continue
            with self._lock:
                self._child, self._known = child, job.order
                self._inform()
            io.watch(child)
            return

    def read_from(self, window: int | None) -> None:
        """The ranks of the node read this window of the sample order, or later ones; None: it has
        no ranks."""
        with self._lock:
            self._order = replace(self._order, window=window)
            self._inform()

    def fetch_from(self, caches: tuple[Partner, ...]) -> None:
        """These nodes have token sets from each other."""
        with self._lock:
            self._order = replace(self._order, caches=caches)
            self._inform()

    def _inform(self) -> None:
        """A message that the process has no room for is sent again with the next call."""
        if self._child is None or self._order == self._known:
            return
        if self._child.send(self._order, or_drop=True):
            self._known = self._order
