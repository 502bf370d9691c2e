"""The data folders of servers that ran for one command: made, and removed when they are old.

A folder is used once. A later server on it would start a job again that had not ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from holdfast_service.embedded_cluster import local_cluster
from holdfast_workers.node_cache import use_locks
from holdfast_workers.node_cache.cached_file import cache_folder
from holdfast_workers.private_files import make_private_folder

FOLDER = "runs"
"""The folder of runs in the user's cache folder."""
KEPT_S = 30 * 86400.0
"""How long a folder in the cache is kept after its last use."""
_NAME = re.compile(r"\d{4}-\d{2}-\d{2}-\d{6}-.+")
_OTHER_THAN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_MOST_OF_A_NAME = 63
_MOST_OF_A_SECOND = 1000


def default_parent() -> Path:
    """Raises NoCacheFolder."""
    return cache_folder(os.environ) / FOLDER


def make(parent: Path, name: str, now: float) -> Path:
    """A new folder below `parent`, named by the time (Unix seconds) and `name`. It is sent with no
    code, if it lies in a folder of code. Raises OSError."""
    make_private_folder(parent)
    short = _OTHER_THAN_NAMES.sub("-", name)[:_MOST_OF_A_NAME]
    stem = time.strftime("%Y-%m-%d-%H%M%S", time.localtime(now)) + f"-{short}"
    for number in range(1, _MOST_OF_A_SECOND):
        folder = parent.absolute() / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            (folder / ".gitignore").write_text("*\n")
            return folder
    raise FileExistsError(f"{parent / stem}: all of its names are taken")


def remove_old(parent: Path, now: float) -> None:
    """Remove the folders that nobody has used for `KEPT_S`."""
    for folder in parent.iterdir() if parent.is_dir() else ():
        if not _NAME.fullmatch(folder.name):
            continue
        with contextlib.suppress(OSError):  # another command has removed it
            if folder.stat().st_mtime < now - KEPT_S and local_cluster.find(folder) is None:
                use_locks.remove_unless_used(folder)
