"""How much memory this process may still claim: the least that the machine and its cgroups allow.

Pages of shared memory count for the memory cgroup of the process that touches them first. Beyond a
cgroup's limit the kernel does not refuse them: it kills a process. So the room is looked up before
pages are claimed. Files are those of Linux cgroups, version 1 (memory controller) and 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast_workers.byte_sizes import size_of
from holdfast_workers.ipc import cgroups

MARGIN_BYTES = 128 << 20
"""Memory that is left free: other processes claim memory at the same time, and programs need
some."""


@dataclass(frozen=True)
class MemoryRoom:
    """The memory that one limit leaves free."""

    limit: str
    """The owner of the limit, for messages."""
    free_bytes: int


@dataclass(frozen=True)
class _Files:
    limit: str
    usage: str
    reclaimable: str


_FILES = {
    cgroups.V1: _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    cgroups.V2: _Files("memory.max", "memory.current", "inactive_file"),
}


def smallest_room(root: Path = Path("/")) -> MemoryRoom | None:
    """The limit that leaves the least memory free; None if nothing is known. `root` contains the
    file systems `proc` and `sys`."""
    rooms = [*_machine(root), *_cgroups(root)]
    return min(rooms, key=lambda room: room.free_bytes, default=None)


def _machine(root: Path) -> Iterator[MemoryRoom]:
    for line in cgroups.read_lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            yield MemoryRoom("the machine's memory", int(rest.split()[0]) * 1024)


def _cgroups(root: Path) -> Iterator[MemoryRoom]:
    for group in cgroups.groups(root, "memory"):
        room = _room_of(group)
        if room is not None:
            yield room


def _room_of(group: cgroups.Group) -> MemoryRoom | None:
    files, folder = _FILES[group.version], group.folder
    limit = cgroups.read_number(folder / files.limit)
    used = cgroups.read_number(folder / files.usage)
    if limit is None or used is None:
        return None
    statistics = (line.partition(" ") for line in cgroups.read_lines(folder / "memory.stat"))
    reclaimable = sum(int(value) for name, _, value in statistics if name == files.reclaimable)
    free = max(0, limit - used + reclaimable)
    return MemoryRoom(f"the memory limit of {size_of(limit)} in {folder}", free)
