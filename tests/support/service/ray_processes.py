"""A Ray cluster of real processes on this machine whose head can be lost: its GCS and its raylets
are killed and started singly, with the GCS's state in Redis or without.

Run as a program, this module owns the processes of one cluster and obeys lines on its standard
input; the kernel ends them with it: `python -m tests.support.service.ray_processes <folder> ...`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast_service.embedded_cluster.ray_settings import (
    CLUSTER_SETTINGS,
    HEAD_MAY_BE_AWAY,
    node_health,
    token_variables,
)

LOOPBACK = "127.0.0.1"
ANSWER_S = 90.0


class RayProcesses:
    """Drives the program from a test, which itself never imports Ray."""

    def __init__(self, *, redis: bool = True, nodes: int = 2, cpus: int = 2) -> None:
        """`cpus`: of each node; the head has none."""
        self.folder = Path(tempfile.mkdtemp(prefix="hf-ray-", dir="/tmp"))
        self.shm = Path(tempfile.mkdtemp(prefix="hf-ray-", dir="/dev/shm"))
        self.folder.joinpath("token").write_text(secrets.token_hex(32))
        self.folder.joinpath("token").chmod(0o600)
        self._redis = _start_redis(self.folder) if redis else None
        self._program = subprocess.Popen(
            [sys.executable, "-m", "tests.support.service.ray_processes", str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.folder.joinpath("program.log").open("w"),
            text=True,
            env={**os.environ, **self.environment(), **self._of_nodes()},
            start_new_session=True,
        )
        try:
            self.address = self.order("start", "head", "0")
            self.names: dict[str, str] = {}
            for number in range(nodes):
                self.start(f"node-{number}", cpus)
        except BaseException:
            self.close()
            raise

    def environment(self) -> dict[str, str]:
        """For a process that connects to the cluster."""
        return {
            **token_variables(self.folder / "token"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "OMP_NUM_THREADS": "1",
            **HEAD_MAY_BE_AWAY,
        }

    def _of_nodes(self) -> dict[str, str]:
        found = {**CLUSTER_SETTINGS, **node_health(1.0, 3), "HOLDFAST_SHM_ROOT": str(self.shm)}
        if self._redis is not None:
            found["RAY_REDIS_ADDRESS"] = f"{LOOPBACK}:{self._redis[1]}"
            found["RAY_external_storage_namespace"] = self.folder.name
        return found

    def start(self, name: str, cpus: int = 0) -> None:
        """Start a raylet, as a further node; `names` has its name by the id that it gets."""
        self.names[self.order("start", name, str(cpus))] = name

    def kill(self, name: str) -> None:
        """SIGKILL to a raylet, or to the `gcs`."""
        self.order("kill", name)

    def start_gcs(self) -> None:
        """At the same address; with Redis, it has its state."""
        self.order("gcs")

    def order(self, *words: str) -> str:
        program = self._program
        assert program.stdin is not None and program.stdout is not None
        program.stdin.write(json.dumps(words) + "\n")
        program.stdin.flush()
        answer = program.stdout.readline()
        if not answer:
            raise RuntimeError(self.folder.joinpath("program.log").read_text()[-3000:])
        return str(json.loads(answer))

    def close(self) -> None:
        assert self._program.stdin is not None
        self._program.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._program.wait(60)
        self._program.kill()
        self._program.wait()
        if self._redis is not None:
            self._redis[0].kill()
            self._redis[0].wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.shm, ignore_errors=True)


@contextlib.contextmanager
def ray_processes(**options: Any) -> Iterator[RayProcesses]:
    cluster = RayProcesses(**options)
    try:
        yield cluster
    finally:
        cluster.close()


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as found:
        return int(found.getsockname()[1])


def _start_redis(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    port = free_port()
    process = subprocess.Popen(
        [
            *("redis-server", "--bind", LOOPBACK, "--port", str(port), "--dir", str(folder)),
            *("--save", "", "--appendonly", "no", "--daemonize", "no"),
        ],
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection((LOOPBACK, port), 1).close()
            return process, port
        time.sleep(0.02)
    raise TimeoutError("Redis did not start")


class _Owner:
    """Owns the processes of one cluster."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._nodes: dict[str, Any] = {}

    def start(self, name: str, cpus: int) -> str:
        # Late: Ray reads its environment on import.
        from ray._private.node import Node
        from ray._private.parameter import RayParams

        head = name == "head"
        address = f"{LOOPBACK}:{self._port}"
        params = RayParams(
            num_cpus=cpus,
            num_gpus=0,
            node_ip_address=LOOPBACK,
            node_name=name,
            temp_dir=str(self._folder),
            object_store_memory=80 * 2**20,
            gcs_address=None if head else address,
            gcs_server_port=self._port if head else None,
            min_worker_port=0,
            max_worker_port=0,
            dashboard_agent_listen_port=0,
            include_dashboard=False,
            include_log_monitor=False,
            no_monitor=True,
        )
        node = Node(params, head=head, shutdown_at_exit=False, spawn_reaper=True)
        self._nodes[name] = node
        return address if head else str(node._node_id)

    def start_gcs(self) -> None:
        self._nodes["head"].start_gcs_server()

    def kill(self, name: str) -> None:
        if name == "gcs":
            self._nodes["head"].kill_gcs_server()
        else:
            self._nodes[name].kill_raylet()

    def end(self) -> None:
        import psutil

        children = psutil.Process().children(recursive=True)
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, 5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    owner = _Owner(parser.parse_args().folder)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints
    try:
        for line in sys.stdin:
            answer = ""
            match json.loads(line):
                case ["start", name, cpus]:
                    answer = owner.start(name, int(cpus))
                case ["kill", name]:
                    owner.kill(name)
                case ["gcs"]:
                    owner.start_gcs()
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        owner.end()


if __name__ == "__main__":
    main()
