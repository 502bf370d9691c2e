"""Which processes belong to an embedded cluster, and how to be rid of them.

Every process of a cluster inherits two marks in its environment. They, with the process tree,
find even what has been orphaned; nothing without the mark of this very cluster is ever touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

CLUSTER_MARK = "HOLDFAST_CLUSTER_ID"
NODE_MARK = "HOLDFAST_NODE_NAME"
KILL_ROUNDS = 20
ROUND_S = 0.05

RAYS_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")


def of_cluster(cluster_id: str) -> list[int]:
    """Pids of all living processes that carry the cluster's mark or descend from one that does,
    but never the caller's own."""
    marked = [pid for pid, environ in _environments() if _marked(environ, cluster_id)]
    below = [child for pid in marked for child in _descendants(pid)]
    return [pid for pid in dict.fromkeys([*marked, *below]) if pid != os.getpid()]


def of_node(cluster_id: str, name: str, raylet_pid: int) -> list[int]:
    """Pids of a node's raylet and of all that runs on the node."""
    mark = f"{NODE_MARK}={name}".encode()
    marked = [
        pid for pid, environ in _environments() if mark in environ and _marked(environ, cluster_id)
    ]
    if raylet_pid not in marked:  # gone: its number may be somebody else's by now
        return marked
    return list(dict.fromkeys([raylet_pid, *_descendants(raylet_pid), *marked]))


def busy(cluster_id: str) -> bool:
    """Whether anything but Ray's own idle processes runs on the cluster: an actor or a task."""
    for pid in of_cluster(cluster_id):
        with contextlib.suppress(psutil.Error):
            title = " ".join(psutil.Process(pid).cmdline())
            if title.startswith("ray::") and not title.startswith(RAYS_OWN):
                return True
    return False


def kill_all(find: Callable[[], list[int]]) -> list[int]:
    """SIGKILL what `find` finds, again until it finds nothing; the pids that were killed."""
    killed: dict[int, None] = {}
    for _ in range(KILL_ROUNDS):
        pids = find()
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed[pid] = None
        time.sleep(ROUND_S)
    return list(killed)


def sweep(cluster_id: str, folders: Iterable[str]) -> None:
    """End every process of a cluster and remove the folders that it alone used."""
    kill_all(lambda: of_cluster(cluster_id))
    for folder in folders:
        if cluster_id in Path(folder).name:  # never what a damaged state file may name
            shutil.rmtree(folder, ignore_errors=True)


def _marked(environ: set[bytes], cluster_id: str) -> bool:
    """Any of our variables that names the cluster is a mark: a process that renames itself, as
    Ray's do, overwrites the beginning of what the kernel shows of its environment, or all."""
    name = cluster_id.encode()
    return any(entry.startswith(b"HOLDFAST_") and entry.endswith(name) for entry in environ)


def _environments() -> Iterable[tuple[int, set[bytes]]]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:  # a process may end, or belong to somebody else; zombies have no environment left
            yield int(entry.name), set((entry / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue


def _descendants(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []
