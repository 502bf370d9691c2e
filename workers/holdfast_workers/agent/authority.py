"""Whom a node agent obeys: one supervisor at a time, and the newest attempt. Thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast_workers.errors import StaleCommand
from holdfast_workers.protocol.commands import AttemptCommand, Command, OpenQuery, Query
from holdfast_workers.protocol.lease import Grant, Lease, clock_s


class Authority:
    """The highest epoch and attempt that the agent received, and the lease that goes with them.

    `notify`: see `Lease`."""

    def __init__(self, notify: Callable[[int, float, int], None]) -> None:
        self._lock = threading.Lock()
        self.lease = Lease(notify)
        self.epoch = 0
        self.attempt = 0

    def accept(self, epoch: int, command: Command | Query) -> None:
        """Raises StaleCommand if a newer supervisor or attempt is known."""
        if isinstance(command, OpenQuery):
            return
        attempt = command.attempt if isinstance(command, AttemptCommand) else None
        with self._lock:
            if epoch < self.epoch:
                raise StaleCommand(f"epoch {epoch} is older than {self.epoch}")
            if attempt is not None and attempt < self.attempt:
                raise StaleCommand(f"attempt {attempt} is older than {self.attempt}")
            is_new_supervisor = epoch > self.epoch
            self.epoch = epoch
            self.attempt = max(self.attempt, attempt or 0)
        if is_new_supervisor:
            self.lease.supervisor_replaced(epoch, clock_s())

    def renew_lease(self, grant: Grant) -> None:
        """Renew the lease, unless the grant is of an older supervisor or attempt."""
        with self._lock:
            current = grant.epoch >= self.epoch and grant.attempt >= self.attempt
        if current:
            self.lease.renew(grant)

    def lease_until(self, attempt: int) -> tuple[float, int]:
        """When the lease of `attempt` ends, and the number of this value."""
        return self.lease.until(attempt)
