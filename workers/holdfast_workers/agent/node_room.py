"""Whether a node has the room that a job needs of it: shared memory, memory, processes.

Measured when an agent starts, and when its node returns to use. A node without the room is fit for
other jobs: only this one does not use it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast_workers.byte_sizes import size_of
from holdfast_workers.ipc import cgroups
from holdfast_workers.memory import shared_room
from holdfast_workers.memory.memory_room import MemoryRoom, smallest_room
from holdfast_workers.protocol.findings import ROOM, HealthFinding, Level
from holdfast_workers.protocol.node_needs import NodeNeeds


@dataclass(frozen=True)
class TaskRoom:
    """Processes and threads that one limit still allows."""

    limit: str
    free: int


@dataclass(frozen=True)
class NodeRoom:
    """What is free on a node, what the job itself has there included. None: not known."""

    shm_free: int | None = None
    memory: MemoryRoom | None = None
    tasks: TaskRoom | None = None
    shm_promised: int = 0
    """The part of `shm_free` that other agents of the job on this machine have reserved."""


def check(
    folder: Path, needs: NodeNeeds, root: Path = Path("/"), *, runs_ranks: bool = False
) -> tuple[HealthFinding, ...]:
    """Measure, and reserve the shared memory that the job needs if it is there. Returns the
    shortages. `folder` exists; see `measure`."""
    with shared_room.one_at_a_time(folder):
        others = shared_room.reservations(folder) if needs.shm_bytes else []
        promised = shared_room.promised(others, needs.nodes)
        room = measure(folder, root, runs_ranks=runs_ranks)
        found = shortages(needs, replace(room, shm_promised=promised), str(folder))
        is_short = any(finding.kind == "shm" for finding in found)
        shared_room.reserve(folder, 0 if is_short else needs.shm_bytes)
    return found


def measure(folder: Path, root: Path = Path("/"), *, runs_ranks: bool = False) -> NodeRoom:
    """`folder`: that of the job's checkpoints in memory, which may not exist yet. `runs_ranks`:
    memory and processes of the job are in use already, so they are not measured."""
    own = shared_room.held_bytes(folder)
    free = _free_bytes(folder)
    room = NodeRoom(shm_free=None if free is None else free + own)
    if runs_ranks:
        return room
    memory = smallest_room(root)
    if memory is not None:
        memory = MemoryRoom(memory.limit, memory.free_bytes + own)
    tasks = min(_task_rooms(root), key=lambda each: each.free, default=None)
    return NodeRoom(room.shm_free, memory, tasks)


def shortages(needs: NodeNeeds, room: NodeRoom, folder: str) -> tuple[HealthFinding, ...]:
    """Why the job cannot use the node; none: it has the room, or nothing is known. Pure."""
    found = []
    if room.shm_free is not None and room.shm_free - room.shm_promised < needs.shm_bytes:
        left = max(0, room.shm_free - room.shm_promised)
        what = f"{folder} has {size_of(left)} free for checkpoints in memory"
        if room.shm_promised:
            what += f" (beside {size_of(room.shm_promised)} for nodes of the job that share it)"
        found.append(_shortage("shm", what, needs.shm_bytes, left, folder))
    if room.memory is not None and room.memory.free_bytes < needs.ram_bytes:
        what = f"{room.memory.limit} leaves {size_of(room.memory.free_bytes)} free"
        found.append(_shortage("memory", what, needs.ram_bytes, room.memory.free_bytes))
    if room.tasks is not None and room.tasks.free < needs.tasks:
        what = f"{room.tasks.limit} leaves {room.tasks.free} processes and threads"
        finding = HealthFinding(
            ROOM,
            "tasks",
            Level.UNFIT,
            f"{what}, the job needs at least {needs.tasks}",
            needed=needs.tasks,
            there=room.tasks.free,
        )
        found.append(finding)
    return tuple(found)


def _shortage(kind: str, what: str, needed: int, there: int, where: str = "") -> HealthFinding:
    text = f"{what}, the job needs at least {size_of(needed)}"
    return HealthFinding(ROOM, kind, Level.UNFIT, text, where, needed=needed, there=there)


def _free_bytes(folder: Path) -> int | None:
    """The free bytes of the file system on which the folder is, or will be."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:
        found = os.statvfs(existing)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _task_rooms(root: Path) -> Iterator[TaskRoom]:
    for group in cgroups.groups(root, "pids"):
        limit = cgroups.read_number(group.folder / "pids.max")
        used = cgroups.read_number(group.folder / "pids.current")
        if limit is not None and used is not None:
            yield TaskRoom(f"the limit of {limit} tasks in {group.folder}", max(0, limit - used))
