"""The embedded Ray cluster: N raylets on this machine that act as N nodes.

A separate process (`keeper.py`) owns the cluster in a session of its own, so training continues
when the API server is killed; the restarted server adopts the cluster. An orderly shutdown calls
:func:`stop`, which leaves no process, shared-memory entry or temporary file.

Promises: at most one cluster per data directory (a file lock decides); everything binds to
loopback; every process of the cluster authenticates with a token from a file that only its owner
can read. The head runs no job, so each of the N nodes may be killed without losing the cluster.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from holdfast_service.embedded_cluster import processes
from holdfast_service.embedded_cluster.ray_settings import HEAD_MAY_BE_AWAY, token_variables
from holdfast_service.extras import Extra, install_command
from holdfast_workers.ipc import environment
from holdfast_workers.private_files import make_private_folder, write_private
from holdfast_workers.protocol import codec

SHM_ROOT = "HOLDFAST_SHM_ROOT"
"""Environment variable of every process of the cluster: the folder under /dev/shm for its segments.
The keeper removes the folder, with any leftover, when it ends."""

POLL_S = 0.05
START_S, STOP_S = 180.0, 20.0


class LocalClusterError(Exception):
    """The embedded cluster could not be started, adopted or stopped; says why."""


@dataclass(frozen=True)
class RayHealthCheck:
    """Settings of Ray's own node health check, for a cluster that is being started."""

    period_s: float = 1.0
    failures: int = 3


@dataclass(frozen=True)
class KeeperOptions:
    """What a keeper is to start: a head, and nodes that divide the machine's CPUs and GPUs."""

    nodes: int | None = None
    """None: one if there are GPUs, else `node_shares.NODES_WITHOUT_GPUS`."""
    cpus_per_node: int | None = None
    """None: an equal part of all."""
    gpus: Sequence[str] | None = None
    """Ids of the GPUs to use; None: all that the keeper finds."""
    orphan_grace_s: float = 1800.0
    """How long the cluster stays without a server while nothing runs on it."""
    health: RayHealthCheck = RayHealthCheck()
    metrics_port: int | None = None
    """Port of the first node's exporter; later nodes use the following ports. None: Ray measures
    nothing."""
    end_with_stdin: bool = False
    """The cluster ends when the pipe that is the keeper's stdin is closed."""


@dataclass(frozen=True)
class LocalNode:
    name: str  # "head", "node-0", "node-1", ...
    node_id: str  # Ray's, hex
    host: str
    raylet_pid: int
    head: bool


@dataclass(frozen=True)
class LocalCluster:
    """An embedded cluster, as its keeper recorded it in `state.json`."""

    cluster_id: str
    address: str  # of the GCS, for `ray.init(address=...)`
    keeper_pid: int
    data_dir: str
    temp_dir: str  # short because socket paths are limited; removed at the end
    shm_root: str
    token_path: str
    nodes: tuple[LocalNode, ...] = ()
    ready: bool = False

    def environment(self) -> dict[str, str]:
        """Environment variables that a process needs before it imports Ray and connects."""
        return ray_environment(Path(self.token_path))

    def node(self, node_id: str) -> LocalNode:
        """The node with this Ray id; raises LocalClusterError if there is none."""
        for node in self.nodes:
            if node.node_id == node_id:
                return node
        raise LocalClusterError(f"the embedded cluster has no node {node_id}")

    @property
    def ray_dir(self) -> Path:
        """Ray's folder. Ray lets all users write in it, so it lies in a private one."""
        return Path(self.temp_dir) / "ray"

    @property
    def control_socket(self) -> Path:
        return Path(self.temp_dir) / "keeper.sock"


@dataclass(frozen=True)
class ClusterFolder:
    """The files of an embedded cluster inside its data directory."""

    root: Path

    @property
    def keeper_lock(self) -> Path:
        return self.root / "keeper.lock"

    @property
    def attached_lock(self) -> Path:
        return self.root / "attached.lock"

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def token(self) -> Path:
        return self.root / "token"

    @property
    def log(self) -> Path:
        return self.root / "keeper.log"

    def make(self) -> None:
        make_private_folder(self.root)

    def read(self) -> LocalCluster | None:
        """The state that the last keeper recorded; that keeper may have ended since."""
        try:
            fields: dict[str, Any] = json.loads(self.state.read_text())
        except FileNotFoundError:
            return None
        nodes = tuple(LocalNode(**node) for node in fields.pop("nodes"))
        return LocalCluster(**fields, nodes=nodes)

    def write(self, cluster: LocalCluster) -> None:
        """Replace the state atomically and readable by its owner only."""
        write_private(self.state, json.dumps(asdict(cluster), indent=1))


def folder(data_dir: Path) -> ClusterFolder:
    return ClusterFolder(data_dir.resolve() / "cluster")


def ray_environment(token_path: Path) -> dict[str, str]:
    """Environment of every process that talks to the embedded cluster, set before `import ray`."""
    return {
        **token_variables(token_path),
        "RAY_USAGE_STATS_ENABLED": "0",
        **HEAD_MAY_BE_AWAY,
        # Ray replaces 127.0.0.1 by the machine's external address unless this variable marks a
        # single-host cluster. Ray named it after the systems that need it by default.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "OMP_NUM_THREADS": "1",
    }


def begin(data_dir: Path, options: KeeperOptions) -> None:
    """Let a cluster start, as `ensure` with the same options does, and do not wait for it: a later
    `ensure` does. Nothing is done if there is one."""
    files = folder(data_dir)
    files.make()
    if not _is_locked(files.keeper_lock):
        _start_keeper(files, options)


def ensure(
    data_dir: Path,
    options: KeeperOptions,
    *,
    timeout_s: float = START_S,
    cancelled: Callable[[], bool] = lambda: False,
) -> LocalCluster:
    """Adopt the cluster of this data directory, or start one.

    A failed start is repeated once. Safe to call from several processes at once.
    Raises LocalClusterError after `timeout_s`, or once `cancelled()` is true; a cluster that was
    being started is ended first.
    """
    if running := find(data_dir):
        return running
    if options.metrics_port is not None and (missing := missing_for_metrics()):
        raise LocalClusterError(
            f"Ray cannot export metrics because {missing} is not installed: "
            f"{install_command(Extra.RAY_METRICS)}, or leave HOLDFAST_RAY_METRICS_PORT unset"
        )
    files = folder(data_dir)
    files.make()
    deadline = time.monotonic() + timeout_s
    # A keeper that has begun is awaited; it counts as the first start.
    keeper = None if _is_locked(files.keeper_lock) else _start_keeper(files, options)
    again = True
    while time.monotonic() < deadline and not cancelled():
        if running := find(data_dir):
            return running
        ended = keeper is None or keeper.poll() is not None
        if ended and not _is_locked(files.keeper_lock):
            if not again:
                break
            # a busy machine may exceed Ray's limit of 30 s
            keeper, again = _start_keeper(files, options), False
        time.sleep(POLL_S)
    if keeper is None:
        stop(data_dir)
    elif keeper.poll() is None:
        _end_keeper(keeper, data_dir)
    raise LocalClusterError(
        f"the embedded Ray cluster did not start within {timeout_s:.0f} s; the end of its log "
        f"({files.log}):\n{_tail(files.log)}"
    )


def find(data_dir: Path) -> LocalCluster | None:
    """The running cluster of this data directory; None unless its keeper lives and it is ready."""
    files = folder(data_dir)
    if not _is_locked(files.keeper_lock):
        return None
    cluster = files.read()
    return cluster if cluster is not None and cluster.ready else None


@contextlib.contextmanager
def attached(data_dir: Path) -> Iterator[None]:
    """Mark the cluster as in use: its keeper does not end it as an orphan meanwhile."""
    files = folder(data_dir)
    files.make()
    with files.attached_lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def server_attached(data_dir: Path) -> bool:
    """Whether a server is attached to the cluster of this data directory."""
    return _is_locked(folder(data_dir).attached_lock)


def stop(data_dir: Path, *, timeout_s: float = STOP_S) -> bool:
    """End the cluster of this data directory; False if there was none.

    Also removes the processes and files that a killed keeper left behind.
    """
    files = folder(data_dir)
    cluster = files.read() if files.state.exists() else None
    if cluster is None:
        return False
    if _is_locked(files.keeper_lock):
        with contextlib.suppress(ProcessLookupError):
            os.kill(cluster.keeper_pid, signal.SIGTERM)
        if not _wait_for_exit(cluster.keeper_pid, timeout_s):
            with contextlib.suppress(ProcessLookupError):
                os.kill(cluster.keeper_pid, signal.SIGKILL)
            _wait_for_exit(cluster.keeper_pid, timeout_s)
    if files.state.exists():
        processes.sweep(cluster.cluster_id, [cluster.temp_dir, cluster.shm_root])
        files.state.unlink(missing_ok=True)
        files.token.unlink(missing_ok=True)
    return True


def kill_node(cluster: LocalCluster, node_id: str) -> list[int]:
    """Simulate a power cut of a node: SIGKILL all its processes; returns their pids."""
    node = cluster.node(node_id)
    return processes.kill_all(
        lambda: processes.of_node(cluster.cluster_id, node.name, node.raylet_pid)
    )


def add_node(cluster: LocalCluster, *, timeout_s: float = 60.0) -> LocalNode:
    """Start one more node, as if a machine had joined the cluster."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.settimeout(timeout_s)
        try:
            channel.connect(str(cluster.control_socket))
            channel.sendall(b"add_node\n")
            answer = channel.makefile().readline()
        except OSError as error:
            raise LocalClusterError(f"the keeper did not add a node: {error}") from error
    fields: dict[str, Any] = json.loads(answer or '{"error": "the keeper closed the connection"}')
    if "error" in fields:
        raise LocalClusterError(f"the keeper did not add a node: {fields['error']}")
    return LocalNode(**fields)


def missing_for_metrics() -> str | None:
    """The first package that Ray's metrics exporter lacks here; None if it lacks none."""
    for name in ("aiohttp", "aiohttp_cors", "grpc", "opencensus", "opentelemetry.exporter"):
        with contextlib.suppress(ModuleNotFoundError):  # its parent package is missing
            if find_spec(name) is not None:
                continue
        return name
    return None


def _start_keeper(files: ClusterFolder, options: KeeperOptions) -> subprocess.Popen[bytes]:
    inherited = environment.for_nodes(os.environ)
    with files.log.open("ab") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "holdfast_service.embedded_cluster.keeper"),
                *(str(files.root.parent), codec.encode(options).decode()),
            ],
            env={**inherited, **ray_environment(files.token)},
            stdin=None if options.end_with_stdin else subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C in the server's terminal must not reach the cluster
        )


def _end_keeper(keeper: subprocess.Popen[bytes], data_dir: Path) -> None:
    keeper.terminate()
    try:
        keeper.wait(STOP_S)
    except subprocess.TimeoutExpired:
        keeper.kill()
        keeper.wait()
        stop(data_dir)


def _is_locked(path: Path) -> bool:
    """Whether another process holds the lock file."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _wait_for_exit(pid: int, timeout_s: float) -> bool:
    """Wait for a process to end; a zombie counts as ended. False after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(POLL_S)
    return False


def _tail(path: Path, lines: int = 20) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return "(empty)"
