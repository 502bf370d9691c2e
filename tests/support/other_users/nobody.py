"""The second user of the machine: root starts the probe (`probe.py`) under the id of nobody."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

NOBODY = 65534
PROBE = Path(__file__).with_name("probe.py")
_ABSTRACT = re.compile(r" @(holdfast-[0-9a-f]+)$", re.MULTILINE)


def got_at(
    *,
    roots: Iterable[Path] = (),
    abstract: Iterable[str] = (),
    ports: Iterable[int] = (),
    api: int = 0,
    processes: Iterable[int] = (),
) -> list[str]:
    """What nobody can read, change or talk to: everything below `roots`, and the rest."""
    paths = [path for root in roots for path in (root, *root.rglob("*"))]
    document = {
        "user": NOBODY,
        "paths": [str(path) for path in paths],
        "unix": [str(path) for path in paths if _is_socket(path)],
        "abstract": list(abstract),
        "ports": list(ports),
        "api": api,
        "processes": list(processes),
    }
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(PROBE)],
        input=json.dumps(document),
        cwd="/",
        env={},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


@contextmanager
def reachable(*folders: Path) -> Iterator[None]:
    """The folders above these let every user pass: pytest's own are closed to all but this user."""
    above = {parent for folder in folders for parent in folder.parents}
    closed = {each: mode for each in above if (mode := each.stat().st_mode) & 0o005 != 0o005}
    try:
        for each, mode in closed.items():
            each.chmod(stat.S_IMODE(mode) | 0o055)
        yield
    finally:
        for each, mode in closed.items():
            each.chmod(stat.S_IMODE(mode))


def abstract_sockets() -> list[str]:
    """The names of Holdfast's, of all users of this machine."""
    return sorted({*_ABSTRACT.findall(Path("/proc/net/unix").read_text())})


def listening_ports(processes: Iterable[int]) -> list[int]:
    found = set()
    for pid in processes:
        with contextlib.suppress(psutil.Error):
            sockets = psutil.Process(pid).net_connections("tcp")
            found |= {each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN}
    return sorted(found)


def written_outside(processes: Iterable[int], folders: Iterable[Path]) -> set[Path]:
    """Files that the processes have open for writing, with a name, elsewhere than below
    `folders`."""
    inside, found = tuple(folders), set()
    for link in (link for pid in processes for link in _links(pid)):
        with contextlib.suppress(OSError):
            flags = int(link.parents[1].joinpath("fdinfo", link.name).read_text().split()[3], 8)
            path = link.readlink()
            regular = path.is_absolute() and path.is_file()
            if flags & os.O_ACCMODE and regular and not any(map(path.is_relative_to, inside)):
                found.add(path)
    return found


def _links(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it has ended
        return []


def _is_socket(path: Path) -> bool:
    try:
        return path.is_socket()
    except OSError:
        return False
