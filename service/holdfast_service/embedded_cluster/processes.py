"""Finds and ends the processes of an embedded cluster.

Every process of a cluster inherits two marks in its environment. The marks and the process tree
also find orphans. A process without the mark of this cluster is never touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from holdfast_workers.ipc import linux_processes

CLUSTER_MARK = "HOLDFAST_CLUSTER_ID"
NODE_MARK = "HOLDFAST_NODE_NAME"
KILL_ROUNDS = 20
ROUND_S = 0.05

RAY_IDLE_TITLES = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")


def of_cluster(cluster_id: str) -> list[int]:
    """Pids of all marked processes of the cluster and their descendants, except the caller."""
    marked = [pid for pid, environ in _environments() if _marked(environ, cluster_id)]
    below = [child for pid in marked for child in linux_processes.descendants(pid)]
    return [pid for pid in dict.fromkeys([*marked, *below]) if pid != os.getpid()]


def of_node(cluster_id: str, name: str, raylet_pid: int) -> list[int]:
    """Pids of a node's raylet and of all processes on that node."""
    mark = f"{NODE_MARK}={name}".encode()
    marked = [
        pid for pid, environ in _environments() if mark in environ and _marked(environ, cluster_id)
    ]
    if raylet_pid not in marked:  # it has ended; its pid may have been reused
        return marked
    return list(dict.fromkeys([raylet_pid, *linux_processes.descendants(raylet_pid), *marked]))


def busy(cluster_id: str) -> bool:
    """Whether an actor or a task runs on the cluster."""
    for pid in of_cluster(cluster_id):
        with contextlib.suppress(psutil.Error):
            title = " ".join(psutil.Process(pid).cmdline())
            if title.startswith("ray::") and not title.startswith(RAY_IDLE_TITLES):
                return True
    return False


def kill_all(find: Callable[[], list[int]]) -> list[int]:
    """SIGKILL the pids that `find` returns until it returns none; returns all killed pids."""
    return linux_processes.kill_all(find, KILL_ROUNDS, ROUND_S)


def sweep(cluster_id: str, folders: Iterable[str]) -> None:
    """End every process of a cluster and remove its own folders."""
    kill_all(lambda: of_cluster(cluster_id))
    for folder in folders:
        if cluster_id in Path(folder).name:  # a damaged state file must not name other folders
            shutil.rmtree(folder, ignore_errors=True)


def _marked(environ: set[bytes], cluster_id: str) -> bool:
    """Whether any HOLDFAST_ variable names the cluster.

    One is enough: a process that renames itself, as Ray's do, overwrites part of the environment
    that the kernel shows.
    """
    name = cluster_id.encode()
    return any(entry.startswith(b"HOLDFAST_") and entry.endswith(name) for entry in environ)


def _environments() -> Iterable[tuple[int, set[bytes]]]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:  # the process may have ended or belong to another user; zombies have no environment
            yield int(entry.name), set((entry / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue
