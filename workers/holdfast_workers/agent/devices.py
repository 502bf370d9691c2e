"""The devices of a node, each of which belongs to one worker at a time, whole.

Ray reserves devices for the agent and names them in a variable of the agent's environment, by
numbers, UUIDs or names of MIG slices: they are passed on as they are. A worker keeps its devices
until its process has ended: until then their memory is in use. Not thread-safe.
"""

from __future__ import annotations

import os
from collections.abc import KeysView

from holdfast_workers.errors import WorkersError
from holdfast_workers.ipc.visible_devices import VisibleDevices


class NoDeviceFree(WorkersError):
    """The node has too few devices left for one more worker."""


class Devices:
    """`per_worker`: devices of each worker, a whole number; 0: workers have none."""

    def __init__(self, per_worker: float) -> None:
        self._per_worker = int(per_worker)
        self._visible = VisibleDevices.of(os.environ)
        self._assigned: dict[str, list[str]] = {}

    @property
    def holders(self) -> KeysView[str]:
        return self._assigned.keys()

    @property
    def enough_free(self) -> bool:
        return len(self._free()) >= self._per_worker

    def assign(self, worker: str) -> dict[str, str]:
        """The environment that gives a new worker its devices. Raises NoDeviceFree."""
        if not self._per_worker:
            return {}
        free = self._free()
        if len(free) < self._per_worker:
            raise NoDeviceFree(
                f"a worker needs {self._per_worker} devices, and of the {len(self._visible.names)} "
                f"in {self._visible.variable} {len(free)} are free"
            )
        self._assigned[worker] = free[: self._per_worker]
        return self._visible.environment_of(self._assigned[worker])

    def free(self, worker: str) -> None:
        """The worker's process has ended, or was never started."""
        self._assigned.pop(worker, None)

    def _free(self) -> list[str]:
        taken = {name for names in self._assigned.values() for name in names}
        return [name for name in self._visible.names if name not in taken]
