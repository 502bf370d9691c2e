"""Divides the free space of a shared memory file system among the agents of one job on a machine.

Nodes of one machine may share `/dev/shm`, and then each sees the same free space. So an agent
reserves, in its folder, what its node needs; the next one counts as taken what others have reserved
and do not hold yet. Reservations are made one after the other, under a lock on the job's folder.

A world uses a limited number of nodes. An agent counts the reservations of so many others only:
a standby takes the place of another node.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast_workers.memory import node_folder

RESERVED_FILE = ".reserved"
LOCK_S = 5.0
LOCK_POLL_S = 0.01


@dataclass(frozen=True)
class RoomReservation:
    """The reservation of another agent, in bytes. `held` is the part that it holds already."""

    needed: int
    held: int


def promised(others: Sequence[RoomReservation], nodes: int) -> int:
    """The bytes that look free and belong to others, beside which an agent of a world of `nodes`
    nodes may have to run. Pure."""
    outstanding = sorted((max(0, each.needed - each.held) for each in others), reverse=True)
    return sum(outstanding[: max(0, nodes - 1)])


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold the lock of the job's folder on this machine, which contains `folder`. Without it after
    `LOCK_S`: a stopped process must not stop others."""
    descriptor = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + LOCK_S
    try:
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def reservations(folder: Path) -> list[RoomReservation]:
    """The reservations of the job's other agents in the file system of `folder`."""
    found = []
    for path in folder.parent.glob(f"*/{RESERVED_FILE}"):
        with contextlib.suppress(OSError, ValueError):  # its agent has just ended
            other = path.parent
            is_beside = other.stat().st_dev == folder.stat().st_dev
            if other != folder and is_beside and node_folder.is_owned(other):
                found.append(RoomReservation(int(path.read_text()), held_bytes(other)))
    return found


def reserve(folder: Path, needed: int) -> None:
    """Reserve so many bytes; 0 withdraws the reservation, which ends with the folder."""
    path = folder / RESERVED_FILE
    if not needed:
        path.unlink(missing_ok=True)
        return
    with contextlib.suppress(OSError):  # memory is full by now, and others see that by themselves
        path.write_text(str(needed))


def held_bytes(folder: Path) -> int:
    """Bytes that the files in the folder take."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.lstat().st_blocks * 512
    return total
