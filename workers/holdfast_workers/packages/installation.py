"""Installs a job's packages into a folder of a node's cache, with pip.

The folder is a virtual environment that sees the packages of the node's Python. pip installs there
only what these do not satisfy; the zygote puts the folder on the module path of the ranks. It is
complete once its marker exists; one process builds it, and others wait. Folders that no process has
used for `UNUSED_S` are removed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from holdfast_workers.errors import WorkersError
from holdfast_workers.ipc import environment
from holdfast_workers.node_cache import use_locks
from holdfast_workers.packages.folders import (
    FOLDER,
    environment_folder,
    modules_of,
    packages_folder,
)
from holdfast_workers.packages.requirements import (
    cause_of,
    distributions_by_name,
    fault_of,
    fixed_versions,
    pins_of,
)
from holdfast_workers.private_files import make_private_folder

COMPLETE = "complete"
LOOK_S = 0.1
UNUSED_S = 30 * 86400.0
LEFT_S = 86400.0
OUTPUT_BYTES = 64 * 1024


class PackagesFailed(WorkersError):
    """The packages cannot be installed here."""


def resolve(
    requirements: Sequence[str], cache: Path, timeout_s: float, stop: threading.Event
) -> tuple[str, ...]:
    """The exact versions that the requirements lead to on this node. Raises PackagesFailed,
    UnstablePackage."""
    make_private_folder(cache / FOLDER)
    with tempfile.TemporaryDirectory(prefix="resolve-", dir=cache / FOLDER) as name:
        folder = Path(name)
        _create(folder / "env")
        report = folder / "report.json"
        arguments = ["install", "--dry-run", "--report", str(report)]
        _pip(folder / "env", arguments, requirements, timeout_s, stop)
        installed = distributions_by_name(metadata.distributions())
        return pins_of(json.loads(report.read_text()), requirements, installed)


def install(pins: Sequence[str], cache: Path, timeout_s: float, stop: threading.Event) -> Path:
    """The folder of modules with exactly these packages, installed if they are not there yet.
    Raises PackagesFailed."""
    deadline = time.monotonic() + timeout_s
    folder = environment_folder(pins, cache)
    make_private_folder(folder.parent)
    with _build_lock(folder, deadline, stop):
        if not (folder / COMPLETE).exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
            _create(folder)
            if pins:
                left = deadline - time.monotonic()
                _pip(folder, ["install", "--no-deps"], pins, left, stop)
            (folder / COMPLETE).touch()
        _use(folder)
    _remove_unused(cache / FOLDER)
    return packages_folder(pins, cache)


def _use(folder: Path) -> None:
    """Mark the folder as in use by this process until it ends: nothing removes it."""
    use_locks.hold(folder / COMPLETE)
    os.utime(folder / COMPLETE)


def _remove_unused(folders: Path) -> None:
    oldest = time.time() - UNUSED_S
    for left in folders.glob("resolve-*"):  # of a process that was killed
        with contextlib.suppress(FileNotFoundError):
            if left.stat().st_mtime < time.time() - LEFT_S:
                shutil.rmtree(left, ignore_errors=True)
    for mark in folders.glob(f"*/{COMPLETE}"):
        with (
            contextlib.suppress(OSError),
            _lock_of(mark.parent).open("w") as build,
            mark.open("r+") as users,
        ):
            is_old = mark.stat().st_mtime < oldest
            if is_old and use_locks.is_free(build) and use_locks.is_free(users):
                shutil.rmtree(mark.parent, ignore_errors=True)


def _lock_of(folder: Path) -> Path:
    return folder.with_suffix(".lock")


def _create(folder: Path) -> None:
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    ours = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    lines = [f"import site; site.addsitedir({path!r})" for path in ours]
    (modules_of(folder) / "node.pth").write_text("\n".join(lines))


def _pip(
    folder: Path,
    arguments: Sequence[str],
    requirements: Sequence[str],
    timeout_s: float,
    stop: threading.Event,
) -> None:
    """Run pip for the environment in `folder`. Raises PackagesFailed."""
    if importlib.util.find_spec("pip") is None:
        raise PackagesFailed(f"{sys.executable} has no pip: install it there, or drop runtime_env")
    # Pins too: an address comes from what other packages say that they need.
    for fault in filter(None, map(fault_of, requirements)):
        raise PackagesFailed(fault)
    wanted, fixed = folder / "requirements.txt", folder / "fixed.txt"
    wanted.write_text("\n".join(requirements))
    versions = fixed_versions(distributions_by_name(metadata.distributions()))
    fixed.write_text("\n".join(f"{name}=={version}" for name, version in versions.items()))
    command = [sys.executable, "-m", "holdfast_workers.packages.pip_process", str(os.getpid())]
    command += [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    command += ["--no-input", *arguments, "--progress-bar", "off"]
    command += ["--requirement", str(wanted), "--constraint", str(fixed)]
    with tempfile.TemporaryFile() as output:
        problem = _run(command, output.fileno(), timeout_s, stop)
        if problem is None:
            return
        output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT_BYTES))
        said = cause_of(output.read().decode(errors="replace").replace(f"{folder}/", ""))
    raise PackagesFailed("\n".join(filter(None, (f"pip {problem}", said))))


def _run(command: list[str], output: int, timeout_s: float, stop: threading.Event) -> str | None:
    """Run the command. Returns the reason of its failure, or None."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment.for_packages(os.environ),
        start_new_session=True,
    )
    deadline = time.monotonic() + timeout_s
    try:
        while process.poll() is None:
            if stop.wait(LOOK_S):
                return "was stopped"
            if time.monotonic() > deadline:
                return f"did not finish within {timeout_s:.0f} s: see timeouts.install_s"
        return f"failed with exit code {process.returncode}" if process.returncode else None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def _build_lock(folder: Path, deadline: float, stop: threading.Event) -> Iterator[None]:
    """Hold the lock while the folder is built; the kernel releases it at the end of the process."""
    with _lock_of(folder).open("w") as lock:
        while True:
            if use_locks.is_free(lock):
                break
            if stop.wait(LOOK_S) or time.monotonic() > deadline:
                raise PackagesFailed(
                    "another process of this node has not finished installing the same "
                    "packages: see timeouts.install_s"
                )
        yield
