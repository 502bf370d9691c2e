"""Which files may hold secrets: those that only their reader, or root, can have written and read.

Container platforms mount secrets read-only, owned by root and readable by the container's group.
There the group is that container's; on other file systems it may have further members.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def refusal(descriptor: int, path: Path) -> str | None:
    """Why the open file at `path` must not hold a secret, and what to do; None: it may."""
    status = os.fstat(descriptor)
    read_only = bool(os.fstatvfs(descriptor).f_flag & os.ST_RDONLY)
    if is_exposed(status.st_mode, read_only=read_only):
        return f"other users can read it: chmod 600 {path}"
    if status.st_uid not in (os.getuid(), 0):
        return "it belongs to another user: copy it, and chmod 600 the copy"
    return None


def is_exposed(mode: int, *, read_only: bool) -> bool:
    """Whether a file of this mode, on a mount that is read-only or not, is open to others."""
    allowed = stat.S_IRWXU | (stat.S_IRGRP if read_only else 0)
    return bool(mode & (stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO) & ~allowed)
