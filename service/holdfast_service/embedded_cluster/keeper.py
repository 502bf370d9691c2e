"""The keeper: the process that starts, owns and ends the embedded cluster.

It holds `keeper.lock` for its whole life and is the parent of the GCS and of every raylet. The
kernel ends them with it, so a killed keeper leaves no cluster behind. It ends on SIGTERM, when the
GCS ends, when no server was attached and nothing ran during the orphan grace, or with its owner if
it is given the pipe of one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

import structlog

from holdfast_service.embedded_cluster import local_gpus, process_priority
from holdfast_service.embedded_cluster import processes as cluster_processes
from holdfast_service.embedded_cluster.local_cluster import (
    SHM_ROOT,
    ClusterFolder,
    KeeperOptions,
    LocalCluster,
    LocalNode,
    folder,
)
from holdfast_service.embedded_cluster.node_shares import (
    NodeShare,
    default_nodes,
    divide,
    share_of,
)
from holdfast_service.embedded_cluster.owner_pipe import OwnerPipe
from holdfast_service.embedded_cluster.ray_settings import (
    CLUSTER_SETTINGS,
    OBJECT_STORE_BYTES,
    node_health,
)
from holdfast_workers import log_setup
from holdfast_workers.node_cache.cached_file import CACHE_VARIABLE
from holdfast_workers.private_files import write_private
from holdfast_workers.protocol import codec

LOOPBACK = "127.0.0.1"
TICK_S = 1.0
LOCK_PATIENCE_S = 1.0
_log = structlog.get_logger()

EXPORTING = {
    "RAY_enable_metrics_collection": "1",
    "RAY_metrics_report_interval_ms": "2000",  # the interval at which agents update rank metrics
}


class StopRequest:
    """Records SIGTERM, SIGINT and the owner's end instead of raising.

    An exception raised by a signal handler is lost while the interpreter runs a callback, and the
    imports of Ray run many callbacks. One of `wakeups` becomes readable when a request arrives.
    """

    def __init__(self, owner: OwnerPipe | None = None) -> None:
        self._signalled = False
        self._owner = owner
        self.wakeup, bell = socket.socketpair()
        self.wakeups = (self.wakeup,) if owner is None else (self.wakeup, owner)
        for end in (self.wakeup, bell):
            end.setblocking(False)
        self._bell = bell
        signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._record)

    @property
    def requested(self) -> bool:
        return self._signalled or (self._owner is not None and self._owner.owner_has_ended())

    def _record(self, _signal: int, _frame: FrameType | None) -> None:
        self._signalled = True


class Keeper:
    """Owns one cluster, from before its first process starts until after its last one ended."""

    def __init__(
        self,
        files: ClusterFolder,
        shares: Sequence[NodeShare],
        options: KeeperOptions,
        stop_request: StopRequest,
        device_variable: str = local_gpus.CUDA_VARIABLE,
    ) -> None:
        """`shares`: of the nodes with which the cluster starts. `device_variable`: the environment
        variable that names the GPUs of a process."""
        self._stop_request = stop_request
        self._files = files
        self._shares = tuple(shares)
        self._device_variable = device_variable
        self._options = options
        self._ray_nodes: dict[str, Any] = {}
        self._attached = time.monotonic()
        cluster_id = secrets.token_hex(4)
        short = Path("/tmp") if os.access("/tmp", os.W_OK) else Path(tempfile.gettempdir())
        self.cluster = LocalCluster(
            cluster_id=cluster_id,
            address="",
            keeper_pid=os.getpid(),
            data_dir=str(files.root.parent),
            temp_dir=str(short / f"holdfast-{cluster_id}"),
            shm_root=f"/dev/shm/holdfast-{cluster_id}",
            token_path=str(files.token),
        )

    def start(self) -> None:
        """Record the cluster, then start it, so that a crash at any moment can be cleaned up."""
        self._files.write(self.cluster)
        write_private(self._files.token, secrets.token_hex(32))
        for made in (self.cluster.temp_dir, f"{self.cluster.temp_dir}/tmp", self.cluster.shm_root):
            Path(made).mkdir(mode=0o700)
        options = self._options
        os.environ |= CLUSTER_SETTINGS
        os.environ |= node_health(options.health.period_s, options.health.failures)
        if options.metrics_port is not None:
            os.environ |= EXPORTING
        os.environ[cluster_processes.CLUSTER_MARK] = self.cluster.cluster_id
        os.environ[SHM_ROOT] = self.cluster.shm_root
        os.environ.setdefault(CACHE_VARIABLE, str(self._files.root.parent / "cache"))
        os.environ["TMPDIR"] = f"{self.cluster.temp_dir}/tmp"
        for name in ("head", *(f"node-{number}" for number in range(len(self._shares)))):
            if self._stop_request.requested:
                return
            self._start_node(name, head=name == "head")
        self._update(replace(self.cluster, ready=True))

    def serve(self) -> None:
        """Serve `add_node` requests and watch the cluster until a signal arrives.

        Raises SystemExit if the GCS has ended or the cluster has become an orphan.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self.cluster.control_socket))
            listener.listen()
            watched = [listener, *self._stop_request.wakeups]
            while not self._stop_request.requested:
                if listener in select.select(watched, [], [], TICK_S)[0]:
                    self._answer(listener.accept()[0])
                self._watch()

    def end(self) -> None:
        """End all processes and remove all segments and files except the log."""
        cluster = self.cluster
        cluster_processes.sweep(cluster.cluster_id, [cluster.temp_dir, cluster.shm_root])
        self._files.token.unlink(missing_ok=True)
        self._files.state.unlink(missing_ok=True)

    def _start_node(self, name: str, *, head: bool) -> LocalNode:
        # Late import: Ray reads its environment on import. `ray.cluster_utils.Cluster` uses the
        # same two classes but leaves an address file for all users of the machine; `ray start`
        # takes a second of CPU per node and cannot mark its processes.
        from ray._private.node import Node
        from ray._private.parameter import RayParams

        share = NodeShare(0) if head else share_of(self._shares, _number(name))
        variables = {cluster_processes.NODE_MARK: name}
        if any(other.gpus for other in self._shares):  # also where a node has none of them
            variables[self._device_variable] = ",".join(share.gpus)
        params = RayParams(
            num_cpus=share.cpus,
            num_gpus=len(share.gpus),
            node_ip_address=LOOPBACK,
            node_name=name,
            temp_dir=str(self.cluster.ray_dir),
            object_store_memory=OBJECT_STORE_BYTES,
            gcs_address=None if head else self.cluster.address,
            gcs_server_port=0 if head else None,
            min_worker_port=0,
            max_worker_port=0,
            dashboard_agent_listen_port=0,
            metrics_export_port=None if head else self._exporter_port(name),
            include_dashboard=False,
            include_log_monitor=False,
            no_monitor=True,
            env_vars=variables,
        )
        # `spawn_reaper` makes the kernel end the children when this process ends.
        started = Node(params, head=head, shutdown_at_exit=False, spawn_reaper=True)
        self._ray_nodes[name] = started
        raylet = started.all_processes["raylet"][0].process
        node = LocalNode(name, started.node_id, LOOPBACK, raylet.pid, head)
        address = started.gcs_address if head else self.cluster.address
        self._update(replace(self.cluster, address=address, nodes=(*self.cluster.nodes, node)))
        return node

    def _exporter_port(self, name: str) -> int | None:
        first = self._options.metrics_port
        return None if first is None else first + _number(name)

    def _update(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self._files.write(cluster)

    def _answer(self, channel: socket.socket) -> None:
        channel.settimeout(TICK_S)
        with channel, contextlib.suppress(OSError):
            request = channel.makefile().readline().strip()
            if request != "add_node":
                answer: dict[str, Any] = {"error": f"unknown request {request!r}"}
            else:
                answer = self._add_node()
            channel.sendall(json.dumps(answer).encode() + b"\n")

    def _add_node(self) -> dict[str, Any]:
        """The new node, or the reason why it did not start; the cluster is then unchanged."""
        name = f"node-{sum(not node.head for node in self.cluster.nodes)}"
        try:
            return asdict(self._start_node(name, head=False))
        except Exception as error:  # Ray raises various types when a raylet does not start in time
            _log.exception("a node did not start", node=name)
            cluster_id = self.cluster.cluster_id
            cluster_processes.kill_all(lambda: cluster_processes.of_node(cluster_id, name, 0))
            return {"error": f"{name} did not start: {type(error).__name__}: {error}"}

    def _watch(self) -> None:
        for ray_node in self._ray_nodes.values():
            for processes in ray_node.all_processes.values():
                for process in processes:
                    process.process.poll()  # reaps killed processes
        gcs = self._ray_nodes["head"].all_processes["gcs_server"][0].process
        if gcs.returncode is not None:
            raise SystemExit(f"the GCS ended with status {gcs.returncode}; ending the cluster")
        if self._is_in_use():
            self._attached = time.monotonic()
        elif time.monotonic() - self._attached > self._options.orphan_grace_s:
            grace_s = self._options.orphan_grace_s
            raise SystemExit(f"orphan for {grace_s:.0f} s; ending the cluster")

    def _is_in_use(self) -> bool:
        with self._files.attached_lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return cluster_processes.busy(self.cluster.cluster_id)


def main(data_dir: str, options: str) -> int:
    """`options`: the document of `KeeperOptions`."""
    log_setup.configure(timestamps=True)
    files = folder(Path(data_dir))
    files.make()
    with files.keeper_lock.open("a") as lock:
        if not _take(lock.fileno()):
            return 0  # another keeper was faster; callers find its cluster
        return _keep(files, codec.decode(options.encode(), KeeperOptions))


def _take(lock: int) -> bool:
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.02)  # `find` holds the lock for a moment to see whether a keeper lives
    return False


def _keep(files: ClusterFolder, options: KeeperOptions) -> int:
    stop_request = StopRequest(OwnerPipe.moved_from_stdin() if options.end_with_stdin else None)
    if left := files.read():  # the last keeper was killed, or the machine crashed
        cluster_processes.sweep(left.cluster_id, [left.temp_dir, left.shm_root])
    gpus = local_gpus.find() if options.gpus is None else local_gpus.named(options.gpus)
    shares = _shares(options.nodes, options.cpus_per_node, gpus.ids)
    _log.info("nodes", shares=[(share.cpus, share.gpus) for share in shares])
    keeper = Keeper(files, shares, options, stop_request, gpus.variable)
    try:
        keeper.start()
        process_priority.lower_session_priority()  # not before: somebody waits for the start
        keeper.serve()
        return 0
    finally:
        keeper.end()


def _shares(
    nodes: int | None, cpus_per_node: int | None, gpus: Sequence[str]
) -> tuple[NodeShare, ...]:
    shares = divide(os.cpu_count() or 1, gpus, nodes or default_nodes(len(gpus)))
    if cpus_per_node is None:
        return shares
    return tuple(replace(share, cpus=cpus_per_node) for share in shares)


def _number(node: str) -> int:
    return int(node.removeprefix("node-"))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
