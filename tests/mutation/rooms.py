"""The rooms that are mutated, and what of them cannot be reached on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.mutation.mutants import sites
from tests.mutation.selection import RoomSite

ROOMS: dict[str, str] = {
    "recovery": "service/holdfast_service/recovery",
    "supervisor": "service/holdfast_service/supervisor",
    "store": "service/holdfast_service/store",
    "reconcile": "service/holdfast_service/reconcile",
    "memory": "workers/holdfast_workers/memory",
    "checkpoint": "workers/holdfast_workers/checkpoint",
    "training": "workers/holdfast_workers/training",
    "parallelize": "workers/holdfast_workers/parallelize",
    "agent": "workers/holdfast_workers/agent",
    "programs": "workers/holdfast_workers/programs",
    "functions": "workers/holdfast_workers/functions",
    "rest": "api/holdfast/rest",
}
PRODUCT = ("api", "service", "workers")

LEFT_OUT = ("service/holdfast_service/store/migrations",)
"""Folders and files. A released migration is never edited."""

ON_ACCELERATORS: dict[str, frozenset[str]] = {
    "workers/holdfast_workers/parallelize/process_groups.py": frozenset({"abort_device_groups"}),
    # On the CPU they call one kernel; the rest stands for kernels that only accelerators lack.
    "workers/holdfast_workers/parallelize/ring_attention.py": frozenset(
        {"_attend", "_attend_backward", "_scores"}
    ),
}
"""Functions by file."""


def room_sites(root: Path, room: str) -> Iterator[RoomSite]:
    """All sites of a room, by path and place."""
    for path in sorted((root / ROOMS[room]).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not any(name == part or name.startswith(f"{part}/") for part in LEFT_OUT):
            for site in sites(read_source(path), ON_ACCELERATORS.get(name, frozenset())):
                yield RoomSite(name, site)


def read_source(path: Path) -> str:
    """With the line ends that it has."""
    return path.read_bytes().decode()
