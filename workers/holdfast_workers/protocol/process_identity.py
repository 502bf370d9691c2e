"""The identity of a process, unique over all machines and restarts.

The kernel that runs the process can answer whether it has ended
(`ipc/linux_processes.py`: `has_ended`), and so can the cluster that started it on its node.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessIdentity:
    """A process of one kernel. Process ids are reused; start times are not."""

    kernel: str
    """The kernel's boot and the namespace that `pid` belongs to, separated by a space."""
    pid: int
    started: int
    """When the process started, in clock ticks since the boot."""
    node_id: str = ""
    """Ray's id of its node."""

    @property
    def machine(self) -> str:
        """The machine's present boot; all containers of a machine share it."""
        return self.kernel.partition(" ")[0]
