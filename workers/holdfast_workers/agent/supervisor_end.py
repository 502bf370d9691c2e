"""Detects the end of the supervisor's process, after which ranks may step on for `lease_s`.

The end of a lifeline only raises the question: a device on the path can end a connection of a
living supervisor. The kernel of the supervisor's process answers it, if it is this one, or else the
cluster. Without a proof before the lease ends, the lease ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from holdfast_workers.ipc import linux_processes
from holdfast_workers.protocol.lease import Lease, clock_s
from holdfast_workers.protocol.process_identity import ProcessIdentity

_log = structlog.get_logger()

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.01, 0.25


class SupervisorEnd:
    """`has_ended(process)`: whether the cluster knows that a process of another node has ended."""

    def __init__(
        self,
        lease: Lease,
        has_ended: Callable[[ProcessIdentity], bool],
        closing: threading.Event,
    ) -> None:
        self._lease = lease
        self._has_ended_elsewhere = has_ended
        self._closing = closing
        self._lock = threading.Lock()
        self._processes: dict[int, ProcessIdentity] = {}
        self._asking: set[int] = set()

    def introduce(self, epoch: int, process: ProcessIdentity | None) -> None:
        """Record the process of the supervisor of this epoch, as it has named itself."""
        if process is not None:
            with self._lock:
                self._processes[epoch] = process

    def lifeline_ended(self, epoch: int) -> None:
        """The lifeline of that supervisor has ended: ask for a proof until the lease ends. Does not
        block."""
        with self._lock:
            process = self._processes.get(epoch)
            if process is None or epoch in self._asking:
                return
            self._asking.add(epoch)
        thread = threading.Thread(
            target=self._ask, args=(epoch, process), name="supervisor-end", daemon=True
        )
        thread.start()

    def _ask(self, epoch: int, process: ProcessIdentity) -> None:
        pause_s, until = _FIRST_PAUSE_S, self._lease.ends_at(epoch)
        try:
            while clock_s() < until and not self._closing.is_set():
                if self._has_ended(process):
                    self._lease.supervisor_ended(epoch, clock_s())
                    return
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        finally:
            with self._lock:
                self._asking.discard(epoch)

    def _has_ended(self, process: ProcessIdentity) -> bool:
        ended = linux_processes.has_ended(process)
        if ended is not None:
            return ended
        try:
            return self._has_ended_elsewhere(process)
        except Exception:  # any error of the cluster's client means: unknown
            _log.exception("cannot ask whether the supervisor has ended")
            return False
