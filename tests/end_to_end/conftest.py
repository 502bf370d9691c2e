"""The whole product as a user starts it: `holdfast serve` on three local nodes, used over REST."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.service.ray_processes import RayProcesses
from tests.support.waiting import eventually

from holdfast import Client
from holdfast.schemas import ServerFile
from holdfast_service.embedded_cluster import local_cluster, processes
from holdfast_service.views.attempts import MemberView
from holdfast_service.views.jobs import JobView

REPOSITORY = Path(__file__).parents[2]
STEPS = 60
UNDISTURBED = "undisturbed"
START_S = 180.0
WITHOUT_STANDBY = {"cpus_per_worker": 0.5, "workers_per_node": 2, "standby_nodes": 0}
PLANTED = "planted-word"
SERVERS_SECRETS = ("HOLDFAST_WEBHOOK_SECRET", "DATABASE_PASSWORD", "HF_TOKEN")
"""Variables of the server with the value PLANTED, which its nodes and jobs must not get."""
ONE_NODE: dict[str, Any] = {"parallel": {"dp_shard": 2}, "resources": WITHOUT_STANDBY}
"""For tests that depend on neither mesh nor standby: fewer processes."""


def spec(**changes: Any) -> dict[str, Any]:
    """A job of four ranks on two nodes with a standby; its step takes some 50 ms on two cores."""
    document: dict[str, Any] = {
        "name": "small-lm",
        "recipe": "pretrain",
        "model": {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "sequence_length": 64},
        "train": {
            "steps": STEPS,
            "global_batch": 8,
            "micro_batch": 2,
            "schedule": {"name": "cosine", "warmup_steps": 5},
        },
        "parallel": {"dp_shard": 2, "tp": 2},
        "resources": {"cpus_per_worker": 0.5, "workers_per_node": 2, "standby_nodes": 1},
        "checkpoint": {"memory": {"every_steps": 1}, "remote": {"every_steps": 20, "keep": 2}},
        "recovery": {"max_failures": 20, "window_s": 3600, "wait_for_replacement_s": 30},
    }
    return {**document, **changes}


class Product:
    """A server that tests can kill and restart, and its jobs' resources on this machine."""

    def __init__(
        self,
        data_dir: Path,
        beside: local_cluster.LocalCluster | RayProcesses | None = None,
        nodes: int = 3,
        **env: str,
    ) -> None:
        """`beside`: the server uses this cluster of another server. `nodes`: of its own cluster;
        each takes a second to start. `env`: its settings."""
        self.data_dir = data_dir
        self._beside = beside
        self._nodes = nodes
        self._env = env if beside is None else {**beside.environment(), **env}
        self.log = data_dir / "server.log"
        self.process: subprocess.Popen[str] | None = None
        self.client: Client

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "holdfast", "serve", "--json", "--port", "0"),
                    *("--data-dir", str(self.data_dir), "--local-nodes", str(self._nodes)),
                    *(("--ray-address", self._beside.address) if self._beside else ()),
                    *(("--store-uri", str(self.data_dir / "store")) if self._beside else ()),
                    "--allow-fault-injection",
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={
                    **os.environ,
                    "PYTHONPATH": _python_path(),
                    "OMP_NUM_THREADS": "1",
                    "HOLDFAST_NODE_LOGS": "json",
                    "HOLDFAST_PACE__CLUSTER_CHECK_S": "100",
                    "HOLDFAST_CANCEL_DEADLINE_S": "600",
                    "HOLDFAST_ALLOW_LOCAL_STORAGE": "true",
                    # a step is seen before its job ends
                    "HOLDFAST_PACE__RECONCILE_INTERVAL_S": "0.25",
                    **dict.fromkeys(SERVERS_SECRETS, PLANTED),
                    "HOLDFAST_WORKER_ENV": "NAMED_*",
                    "NAMED_BY_OPERATOR": "yes",
                    **self._env,
                },
                start_new_session=True,
            )
        assert self.process.stdout is not None
        readable = select.select([self.process.stdout], [], [], START_S)[0]
        line = self.process.stdout.readline() if readable else ""
        assert line, self.log.read_text()[-3000:]
        address = ServerFile.model_validate_json(line).address
        self.client = Client(address, data_dir=self.data_dir, retry_s=60)
        self.client.ready()

    def kill(self) -> None:
        """SIGKILL to the API server, reconciler included."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def kill_rank(self, job_id: str, *ranks: int) -> None:
        """SIGKILL to the processes of ranks of the newest attempt."""
        members = self.members(job_id)
        for pid in [members[rank].pid for rank in ranks]:
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)

    @property
    def cluster(self) -> local_cluster.LocalCluster:
        found = local_cluster.find(self.data_dir)
        assert found is not None
        return found

    def actor_pids(self, kind: str) -> list[int]:
        """Process ids of an actor class: `SupervisorActor` or `StartedAgent`."""
        return self.pids_of(f"ray::{kind}")

    def pids_of(self, program: str) -> list[int]:
        """Process ids of a program of the cluster."""
        pids = processes.of_cluster(self.cluster.cluster_id)
        return [pid for pid in pids if _program(pid).startswith(program)]

    def wait(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        eventually(condition, timeout_s)

    def wait_step(self, job_id: str, step: int, timeout_s: float = 90.0) -> None:
        self.wait(lambda: (self.client.get(job_id).progress.step or 0) >= step, timeout_s)

    def members(self, job_id: str) -> dict[int, MemberView]:
        newest = self.client.attempts(job_id)[-1]
        return {member.rank: member for member in newest.members}

    def finish(self, job_id: str, timeout_s: float = 120.0) -> JobView:
        return self.client.wait(job_id, timeout_s)

    def node_logs(self, job_id: str) -> list[dict[str, Any]]:
        """The JSON log lines of a job's node agents."""
        files = self.cluster.ray_dir.glob("session_*/logs/worker-*.err")
        lines = [line for file in files for line in file.read_text().splitlines()]
        entries = [json.loads(line) for line in lines if line.startswith('{"at":')]
        return [entry for entry in entries if entry["job"] == job_id]

    def samples(self, job_id: str) -> dict[int, Any]:
        points = self.client.metrics(job_id, ["samples"])
        return {point.step: point.values["samples"] for point in points}

    def left_of(self, job_id: str) -> list[str]:
        """The remaining segments and worker processes of a job."""
        segments = [str(path) for path in Path(self.cluster.shm_root).glob(f"*{job_id}")]
        workers = [str(pid) for pid in self.actor_pids("StartedAgent")]
        return [*segments, *workers, *map(str, self.actor_pids("SupervisorActor"))]


def _python_path() -> str:
    """Jobs name recipes of the tests, so the repository must be importable on the nodes."""
    return os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))


def _program(pid: int) -> str:
    try:
        return Path(psutil.Process(pid).cmdline()[0]).name
    except (psutil.Error, IndexError):
        return ""


@contextmanager
def served(folder: Path, nodes: int = 3, **env: str) -> Iterator[Product]:
    """A started product with its data in `folder`; leaves no process behind."""
    started = Product(folder, None, nodes, **env)
    try:
        started.start()
        yield started
    finally:
        if started.process is not None and started.process.poll() is None:
            started.stop()
        local_cluster.stop(started.data_dir)


@pytest.fixture(scope="session")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    with served(tmp_path_factory.mktemp("product")) as started:
        yield started


@pytest.fixture(scope="session")
def undisturbed(product: Product) -> dict[int, str]:
    """Digest per step of a run without faults, the only job named `UNDISTURBED`."""
    job = product.client.submit(spec(name=UNDISTURBED, resources=WITHOUT_STANDBY))
    ended = product.finish(job.id)
    assert ended.state == "SUCCEEDED", ended
    digests = product.client.digests(job.id)
    assert set(range(1, STEPS + 1)) <= set(digests)
    return digests
