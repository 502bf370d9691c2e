"""The folder of shared memory that an agent uses on its node, and such folders without an owner.

An agent locks its folder for its life, and names in it the process that is its node (on Ray, the
raylet). Once both are gone the folder is an orphan: the next node process on the machine has
another id and another folder, so nothing attaches these segments again. Between two incarnations
of an agent no lock is held, but the node lives. An owner in another pid namespace cannot be seen,
and unknown is not gone: such a folder must stay unlocked and unchanged for some time.

Folders are `<base>/<job>/<seat>-<node>`. Imports nothing but the standard library, for `doctor`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast_workers.errors import WorkersError
from holdfast_workers.ipc import linux_processes
from holdfast_workers.private_files import make_private_folder

BASE_VARIABLE = "HOLDFAST_SHM_ROOT"
OWNER_FILE = ".owner"
LOCK_S = 5.0
LOCK_POLL_S = 0.05


class FolderUnusable(WorkersError):
    """An agent cannot have its folder: another process or user has it."""


def memory_base(environ: Mapping[str, str]) -> Path:
    """The folder in shared memory under which all jobs of this user keep their segments."""
    return Path(environ.get(BASE_VARIABLE, f"/dev/shm/holdfast-{os.getuid()}"))


def memory_bases(environ: Mapping[str, str]) -> list[Path]:
    """All such folders on this machine, those of embedded clusters included; only the one that
    the environment names, if it does."""
    own = memory_base(environ)
    return [own] if BASE_VARIABLE in environ else sorted({own, *own.parent.glob("holdfast-*")})


@dataclass(frozen=True)
class OrphanFolder:
    """A folder that no agent holds. `changed`: when its last owner took it (nanoseconds).
    `certain`: its node is known to be gone."""

    path: Path
    changed: int
    certain: bool

    def nbytes(self) -> int:
        return sum(path.lstat().st_blocks for path in self.path.rglob("*")) * 512


class NodeFolder:
    """`base`: the private folder of all jobs of this user; None: the folder stands alone, and
    there are no others to free. `node_pid`: the process that is the node."""

    def __init__(self, path: Path, base: Path | None, node_pid: int) -> None:
        self._path = path
        self._base = base
        self._node_pid = node_pid
        self._lock: int | None = None
        self._doubtful: dict[Path, int] = {}

    def take(self) -> None:
        """Make the folder, unless a former incarnation has, and own it until `remove`, or until
        this process ends. Raises FolderUnusable or OSError."""
        if self._base is not None:
            _make_base(self._base)
        deadline = time.monotonic() + LOCK_S
        while self._lock is None:
            make_private_folder(self._path)
            self._lock = _locked(self._path)
            if self._lock is None:
                if time.monotonic() > deadline:
                    raise FolderUnusable(f"another process uses {self._path}")
                time.sleep(LOCK_POLL_S)
        owner, identity = self._path / OWNER_FILE, _identity(self._node_pid)
        if owner.exists() and owner.read_text() == identity:
            os.utime(owner)  # memory may be full
            return
        fresh = owner.with_suffix(".new")
        fresh.write_text(identity)
        fresh.replace(owner)

    def free_orphans(self) -> list[Path]:
        """Free the folders of nodes that are gone, of this job and of others. Those of which that
        is uncertain are freed if they were orphans at the call before too."""
        if self._base is None:
            return []
        found = find_orphans(self._base)
        due = [
            orphan
            for orphan in found
            if orphan.certain or self._doubtful.get(orphan.path) == orphan.changed
        ]
        self._doubtful = {orphan.path: orphan.changed for orphan in found if orphan not in due}
        return [orphan.path for orphan in due if free(orphan)]

    def remove(self) -> None:
        """Free everything in the folder, and disown it."""
        shutil.rmtree(self._path, ignore_errors=True)
        if self._base is not None:
            _remove_empty(self._path.parent)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def find_orphans(base: Path) -> list[OrphanFolder]:
    """The orphans of this user below `base`. Changes nothing."""
    found = []
    for owner in sorted(base.glob(f"*/*/{OWNER_FILE}")):
        with contextlib.suppress(OSError, ValueError), _holding(owner.parent) as free_to_take:
            status = owner.lstat()
            own = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
            gone = _is_gone(owner.read_text()) if free_to_take and own else False
            if gone is not False:
                found.append(OrphanFolder(owner.parent, status.st_mtime_ns, gone is True))
    return found


def free(orphan: OrphanFolder) -> bool:
    """Remove an orphan, and its job's folder with its last one. False if it has an owner again."""
    with contextlib.suppress(OSError), _holding(orphan.path) as free_to_take:
        if free_to_take and (orphan.path / OWNER_FILE).lstat().st_mtime_ns == orphan.changed:
            shutil.rmtree(orphan.path)
            _remove_empty(orphan.path.parent)
            return True
    return False


def is_owned(folder: Path) -> bool:
    """Whether an agent holds the folder, or its node lives, so that another agent will."""
    with _holding(folder) as free_to_take:
        return not free_to_take or _is_gone((folder / OWNER_FILE).read_text()) is False


def _make_base(folder: Path) -> None:
    """The folder's name can be guessed, and every user may write to /dev/shm."""
    make_private_folder(folder)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise FolderUnusable(f"{folder} is not a folder of this user: remove it")
    folder.chmod(0o700)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the lock of the folder; None if another holds it, or has removed the
    folder meanwhile."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), folder.lstat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


@contextmanager
def _holding(folder: Path) -> Iterator[bool]:
    """Hold the lock of the folder; yields False if another process does."""
    descriptor = _locked(folder)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _identity(pid: int) -> str:
    """The process's pid namespace, pid and start time."""
    return f"{_pid_namespace()} {pid} {linux_processes.start_time(pid) or ''}"


def _is_gone(identity: str) -> bool | None:
    """Whether the process has ended; None: it cannot be seen from here."""
    namespace, pid, _ = identity.split(" ")
    if namespace != _pid_namespace():
        return None
    return not linux_processes.is_alive(int(pid)) or _identity(int(pid)) != identity


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # other agents of the job use it
        folder.rmdir()
