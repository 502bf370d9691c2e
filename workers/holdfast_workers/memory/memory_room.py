"""How much memory this process may still claim: the least that the machine and its cgroups allow.

Pages of shared memory count for the memory cgroup of the process that touches them first. Beyond a
cgroup's limit the kernel does not refuse them: it kills a process. So the room is looked up before
pages are claimed. Files are those of Linux cgroups, version 1 (memory controller) and 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MARGIN_BYTES = 128 << 20
"""Is left free: other processes claim memory at the same time, and programs need some."""


@dataclass(frozen=True)
class MemoryRoom:
    """What one limit leaves free."""

    limit: str
    """Whose limit it is, for messages."""
    free_bytes: int


@dataclass(frozen=True)
class _Version:
    file_system: str
    limit: str
    usage: str
    reclaimable: str


_V1 = _Version("cgroup", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version("cgroup2", "memory.max", "memory.current", "inactive_file")


def smallest_room(root: Path = Path("/")) -> MemoryRoom | None:
    """The limit that leaves the least memory free; None if nothing is known. `root` contains the
    file systems `proc` and `sys`."""
    rooms = [*_machine(root), *_cgroups(root)]
    return min(rooms, key=lambda room: room.free_bytes, default=None)


def _machine(root: Path) -> Iterator[MemoryRoom]:
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            yield MemoryRoom("the machine's memory", int(rest.split()[0]) * 1024)


def _cgroups(root: Path) -> Iterator[MemoryRoom]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = _V1 if controllers else _V2
        for mount_root, mount_point in _mounts(root, version):
            below = _below(PurePosixPath(name), mount_root)
            folder = root / mount_point.relative_to("/") / below
            for group in (folder, *list(folder.parents)[: len(below.parts)]):
                room = _room_of(group, version)
                if room is not None:
                    yield room


def _mounts(root: Path, version: _Version) -> Iterator[tuple[PurePosixPath, PurePosixPath]]:
    """(root within the file system, mount point) of the mounts with the memory controller."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        file_system, _, options = after.split(" ", 2)
        has_memory = version is _V2 or "memory" in options.split(",")
        if file_system == version.file_system and has_memory:
            yield PurePosixPath(before.split(" ")[3]), PurePosixPath(before.split(" ")[4])


def _below(name: PurePosixPath, mount_root: PurePosixPath) -> PurePosixPath:
    """The group's folder below the mount point; in a container, only its own part is mounted."""
    return name.relative_to(mount_root) if name.is_relative_to(mount_root) else PurePosixPath()


def _room_of(group: Path, version: _Version) -> MemoryRoom | None:
    limit, used = _number(group / version.limit), _number(group / version.usage)
    if limit is None or used is None:
        return None
    statistics = (line.partition(" ") for line in _lines(group / "memory.stat"))
    reclaimable = sum(int(value) for name, _, value in statistics if name == version.reclaimable)
    free = max(0, limit - used + reclaimable)
    return MemoryRoom(f"the memory limit of {limit} bytes in {group}", free)


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None  # not "max"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # no such controller, or not for us to read
        return []
