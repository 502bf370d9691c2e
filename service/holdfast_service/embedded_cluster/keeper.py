"""The keeper of the embedded cluster: the process that starts it, holds it and ends it.

It holds `keeper.lock` for its whole life and is the parent of the GCS and of every raylet; the
kernel ends them with it, so a killed keeper leaves no cluster behind. It ends by itself when
told to (SIGTERM), when the GCS is gone, or when for the orphan grace no server was attached and
nothing ran.
"""

from __future__ import annotations

import argparse
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
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast_service.embedded_cluster import process_priority
from holdfast_service.embedded_cluster import processes as cluster_processes
from holdfast_service.embedded_cluster.local_cluster import (
    SHM_ROOT,
    ClusterFolder,
    LocalCluster,
    LocalNode,
    NodeHealth,
    folder,
    write_private,
)

LOOPBACK = "127.0.0.1"
TICK_S = 1.0
LOCK_PATIENCE_S = 1.0
OBJECT_STORE_BYTES = 80 * 2**20  # Holdfast moves no state through Ray's object store
CLUSTER_SETTINGS = {
    "RAY_health_check_initial_delay_ms": "2000",
    # Two cores have better things to do than ten reports a second of what never changes.
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_memory_monitor_refresh_ms": "1000",
    # Training is what the machine is for: Ray would run it at the lowest priority but four.
    "RAY_worker_niceness": "0",
    # Idle Python workers would take the two cores of a small machine for seconds.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


EXPORTING = {
    "RAY_enable_metrics_collection": "1",
    "RAY_metrics_report_interval_ms": "2000",  # as often as the agents set those of their ranks
}


def node_health(period_s: float, failures: int) -> dict[str, str]:
    """After how many checks in a row that a node does not answer Ray takes it for dead, and how
    far apart they are: each waits as long for its answer."""
    period_ms = str(round(period_s * 1000))
    return {
        "RAY_health_check_period_ms": period_ms,
        "RAY_health_check_timeout_ms": period_ms,
        "RAY_health_check_failure_threshold": str(failures),
    }


class Ending:
    """SIGTERM or SIGINT, noted and not raised: what a signal's handler raises is lost if the
    interpreter happens to be in a callback, and the imports of Ray are full of them."""

    def __init__(self) -> None:
        self.asked = False
        self.door, bell = socket.socketpair()
        for end in (self.door, bell):
            end.setblocking(False)
        self._bell = bell
        signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, _signal: int, _frame: FrameType | None) -> None:
        self.asked = True


class Keeper:
    """Owns one cluster from before its first process until after its last."""

    def __init__(
        self,
        place: ClusterFolder,
        cpus_per_node: int,
        orphan_grace_s: float,
        health: dict[str, str],
        ending: Ending,
        metrics_port: int | None = None,
    ) -> None:
        self._ending = ending
        self._place = place
        self._cpus_per_node = cpus_per_node
        self._orphan_grace_s = orphan_grace_s
        self._health = health
        self._metrics_port = metrics_port
        self._ray_nodes: dict[str, Any] = {}
        self._attached = time.monotonic()
        cluster_id = secrets.token_hex(4)
        short = Path("/tmp") if os.access("/tmp", os.W_OK) else Path(tempfile.gettempdir())
        self.cluster = LocalCluster(
            cluster_id=cluster_id,
            address="",
            keeper_pid=os.getpid(),
            data_dir=str(place.root.parent),
            temp_dir=str(short / f"holdfast-{cluster_id}"),
            shm_root=f"/dev/shm/holdfast-{cluster_id}",
            token_path=str(place.token),
        )

    def start(self, nodes: int) -> None:
        """Write down what will be made, then make it: a crash at any moment can be swept."""
        self._place.write(self.cluster)
        write_private(self._place.token, secrets.token_hex(32))
        for made in (self.cluster.temp_dir, f"{self.cluster.temp_dir}/tmp", self.cluster.shm_root):
            Path(made).mkdir(mode=0o700)
        os.environ |= CLUSTER_SETTINGS | self._health
        if self._metrics_port is not None:
            os.environ |= EXPORTING
        os.environ[cluster_processes.CLUSTER_MARK] = self.cluster.cluster_id
        os.environ[SHM_ROOT] = self.cluster.shm_root
        os.environ["TMPDIR"] = f"{self.cluster.temp_dir}/tmp"
        for name in ("head", *(f"node-{number}" for number in range(nodes))):
            if self._ending.asked:
                return
            self._start_node(name, head=name == "head")
        self._update(replace(self.cluster, ready=True))

    def serve(self) -> None:
        """Answer `add_node` and watch, until a signal. Raises SystemExit if the cluster is gone, or
        nobody wants it."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.bind(str(self.cluster.control_socket))
            door.listen()
            while not self._ending.asked:
                if door in select.select([door, self._ending.door], [], [], TICK_S)[0]:
                    self._answer(door.accept()[0])
                self._watch()

    def end(self) -> None:
        """Leave nothing: no process, no segment, no file but the log."""
        cluster = self.cluster
        cluster_processes.sweep(cluster.cluster_id, [cluster.temp_dir, cluster.shm_root])
        self._place.token.unlink(missing_ok=True)
        self._place.state.unlink(missing_ok=True)

    def _start_node(self, name: str, *, head: bool) -> LocalNode:
        # Ray is imported here, after its environment is complete. `ray.cluster_utils.Cluster`
        # does the same with these two classes but leaves an address file for all users of the
        # machine; `ray start` takes a second of CPU per node and cannot name its processes.
        from ray._private.node import Node
        from ray._private.parameter import RayParams

        params = RayParams(
            num_cpus=0 if head else self._cpus_per_node,
            num_gpus=0,
            node_ip_address=LOOPBACK,
            node_name=name,
            temp_dir=self.cluster.temp_dir,
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
            env_vars={cluster_processes.NODE_MARK: name},
        )
        # `spawn_reaper` asks the kernel to end the children with this process (its main thread).
        started = Node(params, head=head, shutdown_at_exit=False, spawn_reaper=True)
        self._ray_nodes[name] = started
        raylet = started.all_processes["raylet"][0].process
        node = LocalNode(name, started.node_id, LOOPBACK, raylet.pid, head)
        address = started.gcs_address if head else self.cluster.address
        self._update(replace(self.cluster, address=address, nodes=(*self.cluster.nodes, node)))
        return node

    def _exporter_port(self, name: str) -> int | None:
        if self._metrics_port is None:
            return None
        return self._metrics_port + int(name.removeprefix("node-"))

    def _update(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self._place.write(cluster)

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
        """The new node, or why there is none: then the cluster is as it was."""
        name = f"node-{sum(not node.head for node in self.cluster.nodes)}"
        try:
            return asdict(self._start_node(name, head=False))
        except Exception as error:  # whatever Ray raises where a raylet does not come up in time
            traceback.print_exc()
            cluster_id = self.cluster.cluster_id
            cluster_processes.kill_all(lambda: cluster_processes.of_node(cluster_id, name, 0))
            return {"error": f"{name} did not start: {type(error).__name__}: {error}"}

    def _watch(self) -> None:
        for ray_node in self._ray_nodes.values():
            for processes in ray_node.all_processes.values():
                for process in processes:
                    process.process.poll()  # reap what was killed
        gcs = self._ray_nodes["head"].all_processes["gcs_server"][0].process
        if gcs.returncode is not None:
            raise SystemExit(f"the GCS ended with status {gcs.returncode}; ending the cluster")
        if self._someone_cares():
            self._attached = time.monotonic()
        elif time.monotonic() - self._attached > self._orphan_grace_s:
            raise SystemExit(f"orphan for {self._orphan_grace_s:.0f} s; ending the cluster")

    def _someone_cares(self) -> bool:
        with self._place.attached_lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return cluster_processes.busy(self.cluster.cluster_id)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="holdfast_service.embedded_cluster.keeper", description=__doc__
    )
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--cpus-per-node", type=int, default=2)
    parser.add_argument("--orphan-grace-s", type=float, default=1800.0)
    parser.add_argument("--health-period-s", type=float, default=NodeHealth.period_s)
    parser.add_argument("--health-failures", type=int, default=NodeHealth.failures)
    parser.add_argument("--metrics-port", type=int, default=None)
    options = parser.parse_args(arguments)
    place = folder(options.data_dir)
    place.make()
    with place.keeper_lock.open("a") as lock:
        if not _take(lock.fileno()):
            return 0  # another keeper was faster; whoever asked finds that one's cluster
        return _keep(place, options)


def _take(lock: int) -> bool:
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.02)  # it may only be somebody's look at whether a keeper lives
    return False


def _keep(place: ClusterFolder, options: argparse.Namespace) -> int:
    process_priority.step_back()
    ending = Ending()
    if left := place.read():  # a keeper was killed, or the machine went down
        cluster_processes.sweep(left.cluster_id, [left.temp_dir, left.shm_root])
    health = node_health(options.health_period_s, options.health_failures)
    keeper = Keeper(
        place,
        options.cpus_per_node,
        options.orphan_grace_s,
        health,
        ending,
        options.metrics_port,
    )
    try:
        keeper.start(options.nodes)
        keeper.serve()
        return 0
    finally:
        keeper.end()


if __name__ == "__main__":
    sys.exit(main())
