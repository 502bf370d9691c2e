"""The folder in which a job's programs start on a node: a copy of its code, of its own.

The code package that the cluster unpacks is shared by all jobs with the same code, and is removed
when none uses it. A program writes files beside its script, so each job gets a copy, on the disk
of the node: it stays over restarts, and after the job for a while. Other nodes have others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from holdfast_workers.node_cache import use_locks
from holdfast_workers.private_files import make_private_folder

FOLDER = "programs"
"""The folder of programs in the node's cache."""
LEFT_S = 3600.0
"""Age after which a copy counts as left behind by a process that was killed."""
KEPT_S = 30 * 86400.0
"""How long the folder of a job that no longer starts is kept."""


def working_folder(code: str, cache: str, job_id: str) -> str:
    """The job's folder, made from `code` if there is none yet; it stays as long as this process.
    Several processes may call this at once. Raises OSError."""
    folders = Path(cache) / FOLDER
    folder = folders / job_id
    if not folder.is_dir():
        make_private_folder(folders)
        with tempfile.TemporaryDirectory(prefix=f".{job_id}.", dir=folders) as whole:
            copy = Path(whole) / "code"
            shutil.copytree(code, copy, symlinks=True)
            with contextlib.suppress(OSError):  # another process was faster
                copy.rename(folder)
    use_locks.hold(folder)
    os.utime(folder)
    _remove_unused(folders)
    return str(folder)


def _remove_unused(folders: Path) -> None:
    for folder in folders.iterdir():
        kept_s = LEFT_S if folder.name.startswith(".") else KEPT_S
        with contextlib.suppress(OSError):  # another process has removed it
            if folder.stat().st_mtime < time.time() - kept_s:
                use_locks.remove_unless_used(folder)
