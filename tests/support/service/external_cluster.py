"""A Ray cluster that Holdfast did not start: a head and nodes, each made by `ray start`.

Each node has a home, caches and shared memory of its own. Where the kernel allows it, folders that
only the server may see are hidden from all of them, in a mount namespace.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
from tests.support.service.ray_processes import free_port
from tests.support.waiting import eventually

from holdfast_service.embedded_cluster.ray_settings import CLUSTER_SETTINGS

STARTED = "Ray runtime started."
START_S = 60.0
END_S = 60.0


@dataclass(frozen=True)
class ExternalNode:
    """`folder`: the home of the node's processes."""

    process: subprocess.Popen[bytes]
    folder: Path
    log: Path

    def processes(self) -> list[psutil.Process]:
        """All processes of the node, those of jobs included."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []


class ExternalCluster:
    """`hidden`: a folder that no node may see."""

    def __init__(self, hidden: Path, environ: Mapping[str, str]) -> None:
        self._hidden = hidden
        self._environ = environ
        self._short = Path(tempfile.mkdtemp(prefix="holdfast-ext-", dir="/tmp"))  # sockets' names
        self._shm = Path(tempfile.mkdtemp(prefix="holdfast-external-", dir="/dev/shm"))
        self._port = free_port()
        self.nodes: list[ExternalNode] = []

    @property
    def address(self) -> str:
        return f"{ray.util.get_node_ip_address()}:{self._port}"

    def start_head(self, cpus: int) -> None:
        port = str(self._port)
        self._start_node(["--head", "--port", port, "--include-dashboard=false"], cpus)

    def add_node(self, cpus: int) -> None:
        """One at a time: Ray cannot start two at once on one machine."""
        self._start_node(["--address", self.address], cpus)

    def close(self) -> None:
        """End every process of every node, and remove their files."""
        found = [process for node in self.nodes for process in node.processes()]
        for node in self.nodes:
            node.process.terminate()
        for node in self.nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(END_S)
            node.process.kill()
            node.process.wait()
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, END_S)
        shutil.rmtree(self._short, ignore_errors=True)
        shutil.rmtree(self._shm, ignore_errors=True)

    def _start_node(self, arguments: Sequence[str], cpus: int) -> None:
        folder = self._short / f"n{len(self.nodes)}"
        folder.mkdir()
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("XDG_")},
            **CLUSTER_SETTINGS,
            **self._environ,
            "HOME": str(folder),
            "RAY_TMPDIR": str(self._short),
            "HOLDFAST_SHM_ROOT": str(self._shm / folder.name),
        }
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, "--block"),
            *("--num-cpus", str(cpus), "--num-gpus", "0"),
            *("--object-store-memory", str(80 * 2**20), "--disable-usage-stats"),
            *("--min-worker-port", "0", "--max-worker-port", "0"),
            *("--dashboard-agent-listen-port", "0"),
        ]
        if can_hide():
            mount = f'mount -t tmpfs hidden {self._hidden} && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", mount, "sh", *command]
        log = folder / "ray.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=environ, stdout=output, stderr=output, cwd=folder
            )
        self.nodes.append(ExternalNode(process, folder, log))
        eventually(lambda: STARTED in log.read_text(), START_S, f"{command}: no node")


def can_hide() -> bool:
    """Whether this user may make mount namespaces."""
    return os.geteuid() == 0 and shutil.which("unshare") is not None


@contextlib.contextmanager
def external_cluster(
    hidden: Path, environ: Mapping[str, str], head_cpus: int
) -> Iterator[ExternalCluster]:
    """With a head, and no other node yet."""
    cluster = ExternalCluster(hidden, environ)
    try:
        cluster.start_head(head_cpus)
        yield cluster
    finally:
        cluster.close()
