"""Keeps a process on the node that brings the token sets of the job into the node's cache.

It has the bucket's credentials and runs no users' code. The ranks wait for the files by
themselves, so its death costs time only: another one takes its place.
"""

from __future__ import annotations

import threading
import time

import structlog

from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.errors import WorkersError
from holdfast_workers.ipc.children import ChildProcesses
from holdfast_workers.ipc.io_loop import NodeIO
from holdfast_workers.protocol.processes import FetcherJob

AGAIN_S = 2.0
"""Least time between the starts of two of them."""

_log = structlog.get_logger()


class TokenFetching:
    """Called in background threads."""

    def __init__(
        self, config: AgentConfig, processes: ChildProcesses, closing: threading.Event
    ) -> None:
        self._job = FetcherJob(config.cache_dir)
        self._processes = processes
        self._closing = closing
        self._forked_at = 0.0

    def fork(self, io: NodeIO) -> None:
        """Start the process, in place of one that has ended."""
        while not self._closing.wait(self._forked_at + AGAIN_S - time.monotonic()):
            self._forked_at = time.monotonic()
            try:
                io.watch(self._processes.fork("fetcher", self._job))
                return
            except (WorkersError, OSError) as error:
                _log.warning("the fetch of the token sets did not start", why=str(error))
