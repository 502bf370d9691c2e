"""Locks that show whether a process uses a file or folder, so that no other removes it.

A user holds a shared lock, and so do the processes that it forks; the kernel releases it at their
end. To remove, a process takes the lock for itself, and does not wait for it.
"""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_OTHER_DESCRIPTORS = 256
"""Descriptors of a process for anything but the files that it has locked."""


def hold(path: Path) -> None:
    """Mark the file as in use by this process until it ends. Raises OSError."""
    fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_SH)


def opened(path: Path) -> int:
    """Open a file that others may remove; it is in use until the descriptor, which the caller owns,
    and its duplicates are closed. Raises OSError; FileNotFoundError, too, if it was removed
    meanwhile."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not is_at(path, descriptor):
            raise FileNotFoundError(f"{path} was removed")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_at(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def note_use(path: Path) -> None:
    """Let the file's time of access be now: many mounts do not keep it. Raises OSError."""
    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Mark the file as in use until the end of the block. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def is_free(file: IO[str] | IO[bytes] | int) -> bool:
    """Whether no other process has locked an open file; it is locked until it is closed. Raises
    OSError where the file system has no such lock: NFS on a file that is open for reading."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlink_unless_used(path: Path) -> bool:
    """Remove a file that no process uses; whether it was removed. A process that begins to use it
    meanwhile finds it gone (`opened`). Raises OSError if it cannot be opened."""
    with path.open("rb") as file:
        try:
            if not is_free(file):
                return False
        except OSError:  # not known
            return False
        path.unlink()
        return True


def remove_unless_used(folder: Path) -> None:
    """Remove a folder that no process uses. Raises OSError if it cannot be opened or locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if is_free(descriptor):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def allow_descriptors(locked: int) -> None:
    """Each locked file needs a descriptor. Where the hard limit is too low, opening names it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = locked + _OTHER_DESCRIPTORS
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def lock_unfinished(path: Path) -> int | None:
    """A file that becomes another one once it is whole, locked for this process; None if another
    process has it. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if is_free(descriptor) and is_at(path, descriptor):
        return descriptor
    os.close(descriptor)
    return None


def close_unfinished(descriptor: int, path: Path) -> None:
    """Remove the unfinished file, unless it got its name. Raises OSError."""
    if is_at(path, descriptor):  # and not one of another process, after this was renamed
        path.unlink()
    os.close(descriptor)
