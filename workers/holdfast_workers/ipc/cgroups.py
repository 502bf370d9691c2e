"""The cgroups of this process: folders whose files hold a controller's limits and usage.

Files are those of Linux cgroups, version 1 and 2; limits of all groups above count too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

V1, V2 = "cgroup", "cgroup2"
"""File systems of the two versions."""


@dataclass(frozen=True)
class Group:
    folder: Path
    version: str


def groups(root: Path, controller: str) -> Iterator[Group]:
    """This process's group and those above it that may limit `controller`. `root` contains the file
    systems `proc` and `sys`."""
    for line in read_lines(root / "proc/self/cgroup"):
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version = V1 if controllers else V2
        for mount_root, mount_point in _mounts(root, version, controller):
            below = _below(PurePosixPath(name), mount_root)
            folder = root / mount_point.relative_to("/") / below
            for each in (folder, *list(folder.parents)[: len(below.parts)]):
                yield Group(each, version)


def read_number(path: Path) -> int | None:
    """The number in the file; None if there is no such file, or no limit (`max`)."""
    lines = read_lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # no such controller, or not for us to read
        return []


def _mounts(
    root: Path, version: str, controller: str
) -> Iterator[tuple[PurePosixPath, PurePosixPath]]:
    """(root within the file system, mount point) of the mounts with the controller."""
    for line in read_lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        file_system, _, options = after.split(" ", 2)
        has_controller = version == V2 or controller in options.split(",")
        if file_system == version and has_controller:
            yield PurePosixPath(before.split(" ")[3]), PurePosixPath(before.split(" ")[4])


def _below(name: PurePosixPath, mount_root: PurePosixPath) -> PurePosixPath:
    """The group's folder below the mount point; in a container, only its own part is mounted."""
    return name.relative_to(mount_root) if name.is_relative_to(mount_root) else PurePosixPath()
