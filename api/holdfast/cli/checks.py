"""The checks of `doctor`: each looks at one thing, gives a finding, and advice if it is not well.

None of them changes anything, starts anything that stays, or takes longer than a few seconds.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from holdfast.cli.common import Options
from holdfast.client import address, config
from holdfast.errors import HoldfastError, ServerError, ServerUnreachable

GIB = 1 << 30
DISK_FEW_GIB, DISK_SOME_GIB = 2, 10
SHM_SOME_GIB = 1
MEMORY_SOME_GIB = 4
FILES_SOME = 4096
NEEDED = ("ray", "torch", "sqlalchemy", "fastapi", "uvicorn")
GPU_S = 10.0
SMALL = "use small models: a job keeps its state in memory twice"
ROOMY = "in a container: --shm-size=8g; memory checkpoints lie there"


class Grade(StrEnum):
    GOOD = "good"
    ODD = "odd"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    what: str
    grade: Grade
    seen: str
    advice: str = ""

    def document(self) -> dict[str, Any]:
        return asdict(self)


def every(data_dir: Path | None, port: int, options: Options) -> Iterator[Finding]:
    """All findings, as they are made; a check that fails is a finding, too."""
    folder = data_dir or Path(
        os.environ.get(address.DATA_DIR_VARIABLE) or Path.home() / ".holdfast"
    )
    looks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("machine", _machine),
        ("python", _python),
        ("limits", _limits),
        ("disk", lambda: _disk(folder)),
        ("shm", _shared_memory),
        ("gpu", _gpus),
        ("ray", _ray),
        ("config", _config),
        ("server", lambda: _server(options)),
        ("port", lambda: _port(port, options)),
    )
    for what, look in looks:
        try:
            yield from look()
        except Exception as error:  # whatever a look fails with is what is to be told
            yield Finding(what, Grade.BAD, f"could not be looked at: {error!r}")


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = f"{platform.system()} {platform.release()}, {cores} cores"
    if platform.system() != "Linux":
        yield Finding("machine", Grade.BAD, system, "serve on Linux; the client runs anywhere")
        return
    yield Finding("machine", Grade.GOOD, system)
    available = _meminfo("MemAvailable")
    grade = Grade.GOOD if available >= MEMORY_SOME_GIB * GIB else Grade.ODD
    advice = (
        "" if grade is Grade.GOOD else "use small models: a job keeps its state in memory twice"
    )
    yield Finding("memory", grade, f"{available / GIB:.1f} GiB available", advice)


def _python() -> Iterator[Finding]:
    seen = f"{platform.python_version()} at {sys.executable}"
    yield Finding("python", Grade.GOOD, seen)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        advice = "install the whole package: pip install holdfast"
        yield Finding("packages", Grade.BAD, f"missing: {', '.join(missing)}", advice)
        return
    versions = [f"{name} {_version(name)}" for name in ("ray", "torch")]
    yield Finding("packages", Grade.GOOD, ", ".join(versions))


def _limits() -> Iterator[Finding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES_SOME:
        able = hard == resource.RLIM_INFINITY or hard >= FILES_SOME
        advice = f"ulimit -n {FILES_SOME}" if able else "raise LimitNOFILE of the service or user"
        yield Finding("limits", Grade.ODD, f"{soft} open files", advice)
    else:
        yield Finding("limits", Grade.GOOD, f"{soft} open files")


def _disk(folder: Path) -> Iterator[Finding]:
    there = next(item for item in (folder, *folder.parents) if item.exists())
    if not os.access(there, os.W_OK):
        advice = "name another by --data-dir or HOLDFAST_DATA_DIR"
        yield Finding("disk", Grade.BAD, f"{there} cannot be written", advice)
        return
    free = shutil.disk_usage(there).free / GIB
    grade = Grade.GOOD
    if free < DISK_SOME_GIB:
        grade = Grade.BAD if free < DISK_FEW_GIB else Grade.ODD
    advice = "" if grade is Grade.GOOD else "make room, or put --data-dir on another disk"
    yield Finding("disk", grade, f"{free:.1f} GiB free for {folder}", advice)


def _shared_memory() -> Iterator[Finding]:
    if platform.system() != "Linux":
        return
    free = shutil.disk_usage("/dev/shm").free / GIB
    grade = Grade.GOOD if free >= SHM_SOME_GIB else Grade.ODD
    advice = "" if grade is Grade.GOOD else ROOMY
    yield Finding("shm", grade, f"{free:.1f} GiB free in /dev/shm", advice)


def _gpus() -> Iterator[Finding]:
    program = shutil.which("nvidia-smi")
    if program is None:
        yield Finding("gpu", Grade.GOOD, "none: ranks compute on the processor")
        return
    asked = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=GPU_S, check=False)
    if done.returncode != 0:
        told = (done.stderr or done.stdout).strip().splitlines()[:1]
        advice = "look at `nvidia-smi` and the driver; ranks cannot use the GPUs"
        yield Finding("gpu", Grade.BAD, "".join(told) or "nvidia-smi failed", advice)
        return
    for number, line in enumerate(done.stdout.strip().splitlines()):
        yield Finding("gpu", Grade.GOOD, f"{number}: {line}")


def _ray() -> Iterator[Finding]:
    named = os.environ.get("HOLDFAST_RAY_ADDRESS")
    if not named:
        yield Finding("ray", Grade.GOOD, "serve starts an embedded cluster of its own")
        return
    host, _, number = named.removeprefix("ray://").rpartition(":")
    if not host or not number.isdigit():
        yield Finding("ray", Grade.ODD, f"{named} is not looked at", "write HOST:PORT")
    elif _answers(host, int(number)):
        yield Finding("ray", Grade.GOOD, f"{named} answers")
    else:
        advice = "start it (ray start --head), or unset HOLDFAST_RAY_ADDRESS for an embedded one"
        yield Finding("ray", Grade.BAD, f"nothing answers at {named}", advice)


def _config() -> Iterator[Finding]:
    try:
        stored = config.load()
    except HoldfastError as error:
        yield Finding("config", Grade.BAD, str(error), "mend or remove the file")
        return
    if config.readable_by_others():
        where = str(config.path())
        yield Finding("config", Grade.ODD, f"{where} is open to others", f"chmod 600 {where}")
        return
    count = len(stored.contexts)
    yield Finding("config", Grade.GOOD, f"{count} context(s), current: {stored.current or 'none'}")


def _server(options: Options) -> Iterator[Finding]:
    try:
        where = address.find(options.address, context=options.context)
    except HoldfastError as error:
        yield Finding("server", Grade.BAD, str(error), "holdfast config contexts")
        return
    named = f"{where.address} (by {where.source})"
    before = time.monotonic()
    try:
        with options.connect(retry_s=0.0, timeout_s=5.0) as client:
            ready = client.ready()
    except ServerUnreachable:
        advice = "start it here by `holdfast serve`, or name another: `holdfast login ADDRESS`"
        yield Finding("server", Grade.ODD, f"none answers at {named}", advice)
        return
    except ServerError as error:
        yield Finding("server", Grade.BAD, f"{named}: {error}", "the server's log says more")
        return
    except HoldfastError as error:
        yield Finding("server", Grade.BAD, f"{named}: {error}", "is it a Holdfast server?")
        return
    took_ms = (time.monotonic() - before) * 1000
    parts = ", ".join(sorted(ready.checks))
    yield Finding("server", Grade.GOOD, f"{named}: ready in {took_ms:.0f} ms ({parts})")


def _port(port: int, options: Options) -> Iterator[Finding]:
    if not _answers("127.0.0.1", port):
        yield Finding("port", Grade.GOOD, f"{port} is free")
        return
    with contextlib.suppress(HoldfastError):
        meant = address.find(options.address, context=options.context).address
        if meant in {f"http://{host}:{port}" for host in ("127.0.0.1", "localhost")}:
            yield Finding("port", Grade.GOOD, f"{port} is the server's")
            return
    yield Finding("port", Grade.ODD, f"{port} is taken", "holdfast serve --port 0 takes a free one")


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def _meminfo(name: str) -> int:
    """Bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return 0


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "?"
