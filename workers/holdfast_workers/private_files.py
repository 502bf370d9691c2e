"""Files and folders that their owner alone may reach: keys, tokens, credentials, caches.

A file is complete and on disk, with mode 0600, before it gets its name. It is read only if nobody
but the reader, or root, can have written or read it.

Container platforms mount secrets read-only, owned by root and readable by the container's group.
There the group is that container's; on other file systems it may have further members.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from holdfast_workers.errors import WorkersError


class PrivateFileRefused(WorkersError):
    """The file must not hold a secret. `why` does not name it: users may read that."""

    def __init__(self, path: Path, why: str, remedy: str) -> None:
        super().__init__(f"{path} is refused: {why}: {remedy}")
        self.why = why


def read_private(path: Path) -> bytes:
    """The content. Raises OSError, PrivateFileRefused."""
    # A pipe that nobody writes must not block the call: it is refused.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        _refuse_exposed(descriptor, path)
        return file.read()


def write_private(path: Path, content: str | bytes) -> None:
    """Replace the file, or create it. Raises OSError."""
    with _complete(path, content) as fresh:
        fresh.replace(path)


def make_private_folder(folder: Path) -> None:
    """Make the folder, and each missing one above it, for their owner alone, whatever the umask.
    One that exists stays as it is: its owner may have opened it on purpose. Raises OSError."""
    for each in reversed((folder, *folder.parents)):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)


def create_private(path: Path, content: str | bytes) -> None:
    """Create the file and its folder, unless it exists, even if several processes do so at the same
    time. Raises OSError."""
    make_private_folder(path.parent)
    if path.exists():
        return
    with _complete(path, content) as fresh, contextlib.suppress(FileExistsError):
        path.hardlink_to(fresh)  # unlike a rename, it fails if another process was faster


def sync_folder(folder: Path) -> None:
    """Make the names in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_exposed(mode: int, *, read_only: bool) -> bool:
    """Whether a file of this mode, on a mount that is read-only or not, is open to others."""
    allowed = stat.S_IRWXU | (stat.S_IRGRP if read_only else 0)
    return bool(mode & (stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO) & ~allowed)


@contextlib.contextmanager
def _complete(path: Path, content: str | bytes) -> Iterator[Path]:
    """A durable file beside `path`, which the block gives its name."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(fresh, flags, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(descriptor)
        yield fresh
        sync_folder(path.parent)
    finally:
        fresh.unlink(missing_ok=True)


def _refuse_exposed(descriptor: int, path: Path) -> None:
    """Raises PrivateFileRefused."""
    status = os.fstat(descriptor)
    read_only = bool(os.fstatvfs(descriptor).f_flag & os.ST_RDONLY)
    if not stat.S_ISREG(status.st_mode):
        raise PrivateFileRefused(path, "it is no regular file", "name a file")
    if status.st_uid not in (os.getuid(), 0):
        raise PrivateFileRefused(
            path, "it belongs to another user", "copy it, and chmod 600 the copy"
        )
    if is_exposed(status.st_mode, read_only=read_only):
        raise PrivateFileRefused(path, "other users can read it", f"chmod 600 {path}")
