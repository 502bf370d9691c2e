"""Locks that show whether a process uses a file or folder, so that no other removes it.

A user holds a shared lock, and so do the processes that it forks; the kernel releases it at their
end. To remove, a process takes the lock for itself, and does not wait for it. A process that will
use a file later marks it with a lock of another kind, which the first one does not see: the file
then goes only for what is used now.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_OTHER_DESCRIPTORS = 256
"""Descriptors of a process for anything but the files that it has locked."""
_FLOCK = "hhqqi4x"
"""`struct flock`: type, whence, start, length, process."""


def hold(path: Path) -> int:
    """Mark the file as in use by this process until it ends, or closes the descriptor. Raises
    OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


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


def keep_for_later(descriptor: int) -> None:
    """The file is not in use any more, but will be, until the descriptor and its duplicates are
    closed. Where the file system has no such lock, it stays in use."""
    with contextlib.suppress(OSError):
        _record_lock(descriptor, fcntl.F_OFD_SETLK, fcntl.F_RDLCK)
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_at(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def note_use(descriptor: int, at_ns: int | None = None) -> None:
    """Let the open file's time of access be this one, since the epoch, or now: many mounts do not
    keep it. Raises OSError."""
    used_ns = time.time_ns() if at_ns is None else at_ns
    os.utime(descriptor, ns=(used_ns, os.fstat(descriptor).st_mtime_ns))


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


def unlink_unless_used(path: Path, or_kept: bool = False) -> bool:
    """Remove a file that no process uses, or keeps for later; whether it was removed. A process
    that begins to use it meanwhile finds it gone (`opened`). Raises OSError if it cannot be
    opened."""
    with path.open("rb") as file:
        try:
            if not is_free(file) or (or_kept and _is_kept(file.fileno())):
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


def _is_kept(descriptor: int) -> bool:
    """Whether others keep the open file for later."""
    try:
        return _record_lock(descriptor, fcntl.F_OFD_GETLK, fcntl.F_WRLCK) != fcntl.F_UNLCK
    except OSError:  # the file system has no such lock
        return False


def _record_lock(descriptor: int, command: int, kind: int) -> int:
    """Set a lock of the whole open file (`fcntl(2)`, "Open file description locks"), or ask which
    one of another stands against it. Returns the kind that the kernel answers."""
    request = struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)
    answer: int = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, command, request))[0]
    return answer
