"""The checks of `doctor`: each inspects one thing and returns a result, with advice if necessary.

A check changes nothing, leaves nothing running, and takes at most a few seconds.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.cli.common import Options
from holdfast.cli.own_servers import choice_of, own_servers
from holdfast.client import address, config
from holdfast.client.synchronous.jobs import Client
from holdfast.errors import HoldfastError, ServerError, ServerUnreachable, Unauthorized
from holdfast_service import extras
from holdfast_service.diagnosis.grades import Grade
from holdfast_workers.byte_sizes import size_of
from holdfast_workers.memory.node_folder import OrphanFolder, find_orphans, memory_bases

GIB = 1 << 30
DISK_BAD_GIB, DISK_LOW_GIB = 2, 10
SHM_LOW_GIB = 1
MEMORY_LOW_GIB = 4
OPEN_FILES_LOW = 4096
GPU_TIMEOUT_S = 10.0
SERVER_TIMEOUT_S = 5.0
SMALL_MODELS = "use small models: a job keeps its state in memory twice"
LARGER_SHM = "in a container: --shm-size=8g; memory checkpoints are stored there"


@dataclass(frozen=True)
class CheckResult:
    """The result of a check. `what`: its name; `seen`: the observation, as text."""

    what: str
    grade: Grade
    seen: str
    advice: str = ""

    def document(self) -> dict[str, Any]:
        return asdict(self)


def run_all(data_dir: Path | None, port: int, options: Options) -> Iterator[CheckResult]:
    """The results of all checks, one by one; a check that raises gives a bad result."""
    folder = data_dir or Path(
        os.environ.get(address.DATA_DIR_VARIABLE) or Path.home() / ".holdfast"
    )
    checks: tuple[tuple[str, Callable[[], Iterator[CheckResult]]], ...] = (
        ("machine", _machine),
        ("python", _python),
        ("limits", _limits),
        ("disk", lambda: _disk(folder)),
        ("shm", _shared_memory),
        ("gpu", _gpus),
        ("ray", _ray),
        ("config", _config),
        ("server", lambda: _server(options, data_dir)),
        ("server", lambda: _other_servers(options, data_dir)),
        ("port", lambda: _port(port, options, data_dir)),
    )
    for what, check in checks:
        try:
            yield from check()
        except Exception as error:  # any failure of a check is its result
            yield CheckResult(what, Grade.BAD, f"could not be checked: {error!r}")


def run_cluster(options: Options) -> Iterator[CheckResult]:
    """The results of the server's check of every node; `what` starts with the node's address."""
    try:
        with options.connect(retry_s=0.0) as client:
            checked = client.check_cluster()
    except HoldfastError as error:
        yield CheckResult("cluster", Grade.BAD, str(error), "holdfast doctor: is the server ready?")
        return
    if not checked.findings:
        yield CheckResult("cluster", Grade.BAD, "it has no node", "holdfast cluster join")
    for found in checked.findings:
        what = found.host if found.what == "node" else f"{found.host} {found.what}"
        yield CheckResult(what, found.grade, found.seen, found.advice)


def _machine() -> Iterator[CheckResult]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = f"{platform.system()} {platform.release()}, {cores} cores"
    if platform.system() != "Linux":
        yield CheckResult("machine", Grade.BAD, system, "serve on Linux; the client runs anywhere")
        return
    yield CheckResult("machine", Grade.GOOD, system)
    available = _meminfo("MemAvailable")
    grade = Grade.GOOD if available >= MEMORY_LOW_GIB * GIB else Grade.ODD
    advice = "" if grade is Grade.GOOD else SMALL_MODELS
    yield CheckResult("memory", grade, f"{size_of(available)} available", advice)


def _python() -> Iterator[CheckResult]:
    seen = f"{platform.python_version()} at {sys.executable}"
    yield CheckResult("python", Grade.GOOD, seen)
    missing = extras.missing_for_server()
    advice = f"to serve or train on this machine: {extras.install_command(extras.Extra.SERVER)}"
    if len(missing) == len(extras.SERVER_PACKAGES):
        yield CheckResult("packages", Grade.ODD, "only the client is installed", advice)
        return
    if missing:
        yield CheckResult("packages", Grade.BAD, f"missing: {', '.join(missing)}", advice)
        return
    versions = [f"{name} {_version(name)}" for name in ("ray", "torch")]
    yield CheckResult("packages", Grade.GOOD, ", ".join(versions))


def _limits() -> Iterator[CheckResult]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES_LOW:
        raisable = hard == resource.RLIM_INFINITY or hard >= OPEN_FILES_LOW
        advice = (
            f"ulimit -n {OPEN_FILES_LOW}"
            if raisable
            else "raise LimitNOFILE of the service or user"
        )
        yield CheckResult("limits", Grade.ODD, f"{soft} open files", advice)
    else:
        yield CheckResult("limits", Grade.GOOD, f"{soft} open files")


def _disk(folder: Path) -> Iterator[CheckResult]:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        advice = "set another one with --data-dir or HOLDFAST_DATA_DIR"
        yield CheckResult("disk", Grade.BAD, f"{existing} is not writable", advice)
        return
    free = shutil.disk_usage(existing).free
    grade = Grade.GOOD
    if free < DISK_LOW_GIB * GIB:
        grade = Grade.BAD if free < DISK_BAD_GIB * GIB else Grade.ODD
    advice = "" if grade is Grade.GOOD else "free space, or put --data-dir on another disk"
    yield CheckResult("disk", grade, f"{size_of(free)} free for {folder}", advice)


def _shared_memory() -> Iterator[CheckResult]:
    if platform.system() != "Linux":
        return
    free = shutil.disk_usage("/dev/shm").free
    grade = Grade.GOOD if free >= SHM_LOW_GIB * GIB else Grade.ODD
    advice = "" if grade is Grade.GOOD else LARGER_SHM
    yield CheckResult("shm", grade, f"{size_of(free)} free in /dev/shm", advice)
    orphans = orphan_memory()
    if orphans:
        size = sum(orphan.nbytes() for orphan in orphans)
        seen = f"{size_of(size)} in {len(orphans)} folders of nodes that are gone"
        yield CheckResult("shm", Grade.ODD, seen, "free it: holdfast doctor --clean")


def orphan_memory() -> list[OrphanFolder]:
    """Folders of memory checkpoints of this user that no agent will ever use again."""
    bases = memory_bases(os.environ)
    return [orphan for base in bases for orphan in find_orphans(base) if orphan.certain]


def _gpus() -> Iterator[CheckResult]:
    program = shutil.which("nvidia-smi")
    if program is None:
        yield CheckResult("gpu", Grade.GOOD, "none: ranks compute on the CPU")
        return
    command = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=GPU_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        message = (done.stderr or done.stdout).strip().splitlines()[:1]
        advice = "check `nvidia-smi` and the driver; ranks cannot use the GPUs"
        yield CheckResult("gpu", Grade.BAD, "".join(message) or "nvidia-smi failed", advice)
        return
    for number, line in enumerate(done.stdout.strip().splitlines()):
        yield CheckResult("gpu", Grade.GOOD, f"{number}: {line}")


def _ray() -> Iterator[CheckResult]:
    named = os.environ.get("HOLDFAST_RAY_ADDRESS")
    if not named:
        yield CheckResult("ray", Grade.GOOD, "serve starts its own embedded cluster")
        return
    host, _, number = named.removeprefix("ray://").rpartition(":")
    if not host or not number.isdigit():
        yield CheckResult("ray", Grade.ODD, f"{named} is not checked", "write HOST:PORT")
    elif _answers(host, int(number)):
        yield CheckResult("ray", Grade.GOOD, f"{named} answers")
    else:
        advice = "start it (ray start --head), or unset HOLDFAST_RAY_ADDRESS for an embedded one"
        yield CheckResult("ray", Grade.BAD, f"no answer from {named}", advice)


def _config() -> Iterator[CheckResult]:
    try:
        stored = config.load()
    except HoldfastError as error:
        yield CheckResult("config", Grade.BAD, str(error), "correct or remove the file")
        return
    if config.readable_by_others():
        path = str(config.path())
        yield CheckResult("config", Grade.ODD, f"{path} is readable by others", f"chmod 600 {path}")
        return
    count = len(stored.contexts)
    yield CheckResult(
        "config", Grade.GOOD, f"{count} context(s), current: {stored.current or 'none'}"
    )


def _server(options: Options, data_dir: Path | None) -> Iterator[CheckResult]:
    try:
        server = address.find(options.address, context=options.context, data_dir=data_dir)
    except HoldfastError as error:
        yield CheckResult("server", Grade.BAD, str(error), "holdfast config contexts")
        return
    named = f"{server.address} (from {server.source})"
    before = time.monotonic()
    try:
        with Client(
            options.address,
            context=options.context,
            data_dir=data_dir,
            retry_s=0.0,
            timeout_s=SERVER_TIMEOUT_S,
        ) as client:
            ready = client.ready()
            client.version()  # needs the token
    except Unauthorized:
        advice = "set HOLDFAST_DATA_DIR to its data directory, or HOLDFAST_TOKEN"
        yield CheckResult("server", Grade.BAD, f"{named} does not know this user", advice)
        return
    except ServerUnreachable:
        advice = "start it with `holdfast serve`, or choose another: `holdfast login ADDRESS`"
        yield CheckResult("server", Grade.ODD, f"no answer from {named}", advice)
        return
    except ServerError as error:
        yield CheckResult("server", Grade.BAD, f"{named}: {error}", "see the server's log")
        return
    except HoldfastError as error:
        yield CheckResult("server", Grade.BAD, f"{named}: {error}", "is it a Holdfast server?")
        return
    took_ms = (time.monotonic() - before) * 1000
    parts = ", ".join(sorted(ready.checks))
    yield CheckResult("server", Grade.GOOD, f"{named}: ready in {took_ms:.0f} ms ({parts})")


def _other_servers(options: Options, data_dir: Path | None) -> Iterator[CheckResult]:
    """The servers of this user on this machine that commands do not find."""
    found = address.find(options.address, context=options.context, data_dir=data_dir).address
    for server in own_servers():
        if address.normal(server.address) != found:
            seen = f"one of yours runs at {server.address}, with data in {server.data_dir}"
            advice = f"for its jobs: {choice_of(server.data_dir)}"
            yield CheckResult("server", Grade.GOOD, seen, advice)


def _port(port: int, options: Options, data_dir: Path | None) -> Iterator[CheckResult]:
    if not _answers("127.0.0.1", port):
        yield CheckResult("port", Grade.GOOD, f"{port} is free")
        return
    with contextlib.suppress(HoldfastError):
        chosen = address.find(options.address, context=options.context, data_dir=data_dir).address
        if chosen in {f"http://{host}:{port}" for host in ("127.0.0.1", "localhost")}:
            yield CheckResult("port", Grade.GOOD, f"{port} is used by the server")
            return
    yield CheckResult(
        "port", Grade.ODD, f"{port} is in use", "holdfast serve --port 0 chooses a free one"
    )


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def _meminfo(name: str) -> int:
    """The value of an entry of /proc/meminfo, in bytes; 0 if it is missing."""
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
