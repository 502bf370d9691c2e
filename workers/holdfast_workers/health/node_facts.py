"""Measures what a node offers to training, for the check of a whole cluster. Does not evaluate it.

Imports neither torch nor Ray. A value that cannot be measured is None; nothing here raises.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast_workers import build
from holdfast_workers.health.host import read_host
from holdfast_workers.ipc import cgroups
from holdfast_workers.private_files import make_private_folder

PACKAGES = ("ray", "torch", "holdfast-train")
ROOT = Path("/")


@dataclass(frozen=True)
class NodeFacts:
    """One node as measured on it. Sizes in bytes; None: not measured, or without a limit."""

    hostname: str = ""
    user_id: int = 0
    python: str = ""
    packages: tuple[tuple[str, str], ...] = ()
    """Names of PACKAGES with their versions; a missing package is left out."""
    build: str = ""
    """The digest of the code of its ranks (`holdfast_workers.build`)."""
    cpus: int = 0
    memory_total: int | None = None
    memory_available: int | None = None
    shared_total: int | None = None
    """Size of the file system of /dev/shm."""
    shared_free: int | None = None
    memory_problem: str = ""
    """Why no memory checkpoints can be stored there; "": they can."""
    cache_free: int | None = None
    cache_problem: str = ""
    """Why data and code cannot be cached; "": they can."""
    tls: bool = False
    """Whether it is to use TLS between nodes."""
    tls_days: float | None = None
    """Days until the node's certificate expires."""
    tls_problem: str = ""
    """Why its certificates are unusable; "": they are usable."""
    tasks_limit: int | None = None
    """The most processes and threads of its control groups and its user."""
    tasks: int = 0
    """Processes and threads of its control group now."""
    open_files: int | None = None
    locked_bytes: int | None = None
    """The most memory that a process may lock."""
    gpus: tuple[str, ...] = ()
    """A name for each GPU that the driver shows."""
    driver: str = ""
    gpu_problem: str = ""


def measure(memory_base: Path, cache_dir: Path, root: Path = ROOT) -> NodeFacts:
    """Measure this node. `memory_base`: its folder of memory checkpoints (`memory/node_folder.py`);
    `cache_dir`: its folder of caches; `root`: the folder of /proc and /sys."""
    host = read_host([str(memory_base), str(cache_dir)], root)
    free = {disk.folder: (disk.free, disk.total) for disk in host.disks}
    shared_free, shared_total = free.get(str(memory_base), (None, None))
    gpus, driver, gpu_problem = _gpus()
    limit, tasks = _tasks(root)
    return NodeFacts(
        hostname=socket.gethostname(),
        user_id=os.getuid(),
        python=platform.python_version(),
        packages=_packages(),
        build=build.on_disk(),
        cpus=len(os.sched_getaffinity(0)),
        memory_total=host.memory_total,
        memory_available=host.memory_available,
        shared_total=shared_total,
        shared_free=shared_free,
        memory_problem=_write_problem(memory_base),
        cache_free=free.get(str(cache_dir), (None, None))[0],
        cache_problem=_write_problem(cache_dir),
        tasks_limit=limit,
        tasks=tasks,
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        gpus=gpus,
        driver=driver,
        gpu_problem=gpu_problem,
    )


def connect_problem(address: tuple[str, int], timeout_s: float) -> str:
    """Why this node cannot connect to that host and port; "": it can."""
    try:
        socket.create_connection(address, timeout_s).close()
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def clock_offset_s(ask: Callable[[], float], rounds: int = 5) -> tuple[float, float]:
    """The lead of the clock that `ask` reads over this machine's, and the greatest error of that
    figure, in seconds. The round with the shortest delay counts (as in NTP, RFC 5905, section
    8)."""
    measured = []
    for _ in range(rounds):
        before, began = time.time(), time.monotonic()
        there = ask()
        delay = time.monotonic() - began
        measured.append((delay, there - before - delay / 2))
    delay, offset = min(measured)
    return offset, delay / 2


def _packages() -> tuple[tuple[str, str], ...]:
    found = []
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append((name, importlib.metadata.version(name)))
    return tuple(found)


def _write_problem(folder: Path) -> str:
    """Make the folder, private to this user, and write into it: what an agent does. Leaves nothing
    behind."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    probe = folder / f".check-{uuid.uuid4().hex}"
    try:
        make_private_folder(folder)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return f"{folder} is not a folder of user {os.getuid()}"
        try:
            probe.write_bytes(b"\0" * 4096)
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror}"
    finally:
        with contextlib.suppress(OSError):  # an agent uses it by now
            for made in missing:
                made.rmdir()
    return ""


def _limit(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _tasks(root: Path) -> tuple[int | None, int]:
    """The least limit of tasks among the control groups of this process and its user, and the tasks
    of the control group with that limit, or of the whole machine."""
    user = _limit(resource.RLIMIT_NPROC) if os.getuid() else None
    limits = [] if user is None else [(user, _tasks_of_machine(root))]
    for group in cgroups.groups(root, "pids"):
        most = cgroups.read_number(group.folder / "pids.max")
        used = cgroups.read_number(group.folder / "pids.current")
        if most is not None and used is not None:
            limits.append((most, used))
    return min(limits, key=lambda found: found[0] - found[1], default=(None, 0))


def _tasks_of_machine(root: Path) -> int:
    """The fourth field of /proc/loadavg is RUNNING/ALL."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((root / "proc/loadavg").read_text().split()[3].partition("/")[2])
    return 0


def _gpus() -> tuple[tuple[str, ...], str, str]:
    """Names of the GPUs that the driver shows, the driver's version, and what failed."""
    if shutil.which("nvidia-smi") is None and not Path("/dev/nvidiactl").exists():
        return (), "", ""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            names = [
                str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index)))
                for index in range(pynvml.nvmlDeviceGetCount())
            ]
            return tuple(names), str(pynvml.nvmlSystemGetDriverVersion()), ""
        finally:
            pynvml.nvmlShutdown()
    except ImportError:
        return (), "", "the package nvidia-ml-py is not installed"
    except Exception as error:  # NVML has an error class of its own, known only once imported
        return (), "", f"{type(error).__name__}: {error}"
