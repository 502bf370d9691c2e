"""Takes an elastic Ray Train job through the loss and the return of a node; leaves nothing behind.

The cluster is Holdfast's embedded one, so that nodes, their CPUs and Ray's settings are the same as
on the other side. Ray Train reads the cluster's nodes every 20 s (`AutoscalingCoordinator`), and
restarts all workers from the newest checkpoint whenever the size changes. A pause here is without
the detection of a new node, because the old world trains on meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.conditions import ROOT, environment
from benchmarks.figures import AppliedStep
from benchmarks.ray_train_side import BEST, DEFAULT, RayTrainFailed, RayTrainSetting
from benchmarks.resizes import nodes
from benchmarks.resizes.changes import Change, MeasuredChange, measure_change
from holdfast_service.embedded_cluster import local_cluster, processes
from holdfast_service.embedded_cluster.local_cluster import LocalCluster, RayHealthCheck
from holdfast_workers.node_cache.cached_file import cache_folder

START_S = 240.0
CHANGE_S = 300.0
POLL_S = 0.1
LOG_LINES = 30


@dataclass(frozen=True)
class ElasticSetting:
    """A configuration of Ray Train with what concerns resizes alone. `why` is printed."""

    base: RayTrainSetting
    resize_interval_s: float
    """`elastic_resize_monitor_interval_s`: of the look for a better size while it trains."""
    environment: Mapping[str, str]
    why: str

    @property
    def name(self) -> str:
        return self.base.name


SETTINGS = (
    ElasticSetting(DEFAULT, 60.0, {}, DEFAULT.why),
    ElasticSetting(
        BEST,
        1.0,
        # After a loss it first tries the old size as long as its view of the nodes is old.
        {**BEST.environment, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "2"},
        f"{BEST.why}; a group without room given up after 2 s instead of 60; "
        "elastic_resize_monitor_interval_s 1 instead of 60",
    ),
)


def measure(
    spec: Mapping[str, Any],
    setting: ElasticSetting,
    health: RayHealthCheck,
    size: int,
    rounds: int,
    settle_steps: int,
) -> Iterator[MeasuredChange]:
    """Loss and return of a node per round, on a cluster of `size` nodes, each once it is measured.

    `spec` has the largest mesh. Between two changes the job makes `settle_steps` steps.
    """
    ranks = int(spec["parallel"]["dp_shard"])
    smaller = ranks // size * (size - 1)
    with _training(spec, setting, health, size) as run:
        run.wait(lambda: run.steps_of(ranks) >= settle_steps, START_S, "start")
        for number in range(rounds):
            yield run.lose_node(number, smaller)
            run.settle(smaller, settle_steps)
            yield run.return_node(ranks)
            run.settle(ranks, settle_steps)


@dataclass(frozen=True)
class _RankLog:
    """What one rank process wrote."""

    header: dict[str, Any]
    steps: tuple[dict[str, Any], ...]


@dataclass
class _ElasticRun:
    process: subprocess.Popen[bytes]
    cluster: LocalCluster
    folder: Path
    log: Path

    def lose_node(self, number: int, ranks: int) -> MeasuredChange:
        newest = self._newest()
        members = [log.header for log in self._logs() if log.header["world"] == newest["world"]]
        members.sort(key=lambda header: header["rank"])
        node_id = members[-1 - number % len(members)]["node_id"]

        def lose() -> None:
            local_cluster.kill_node(self.cluster, node_id)

        return self._change(Change.SHRINK, newest, ranks, lose)

    def return_node(self, ranks: int) -> MeasuredChange:
        return self._change(Change.GROW, self._newest(), ranks, lambda: nodes.add(self.cluster))

    def settle(self, ranks: int, steps: int) -> None:
        self.wait(lambda: self.steps_of(ranks) >= steps, CHANGE_S, f"make {steps} steps")

    def steps_of(self, ranks: int) -> int:
        """Steps of the newest world, if it has `ranks` ranks; else none."""
        logs = self._logs()
        worlds = [log.header["world"] for log in logs]
        return max(
            (
                len(log.steps)
                for log in logs
                if log.header["world"] == max(worlds) and log.header["world_size"] == ranks
            ),
            default=0,
        )

    def wait(self, condition: Callable[[], bool], timeout_s: float, goal: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                log_tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])
                raise RayTrainFailed(f"Ray Train did not {goal} in {timeout_s:g} s:\n{log_tail}")
            time.sleep(POLL_S)

    def _change(
        self, change: Change, old: Mapping[str, Any], ranks: int, cause: Callable[[], None]
    ) -> MeasuredChange:
        at = time.time()
        cause()
        found: list[MeasuredChange] = []

        def is_measured() -> bool:
            measured = self._measured(change, old, ranks, at)
            found.extend([measured] if measured is not None else [])
            return bool(found)

        self.wait(is_measured, CHANGE_S, f"make a step with {ranks} ranks after {change.value}")
        return found[0]

    def _measured(
        self, change: Change, old: Mapping[str, Any], ranks: int, at: float
    ) -> MeasuredChange | None:
        logs = self._logs()
        worlds = sorted({log.header["world"] for log in logs})
        new = [
            log.header
            for log in logs
            if log.header["world"] > old["world"] and log.header["world_size"] == ranks
        ]
        if not new:
            return None
        world = worlds.index(min(header["world"] for header in new))
        commits = [
            AppliedStep(worlds.index(log.header["world"]), line["step"], line["at"])
            for log in logs
            for line in log.steps
        ]
        members = [header for header in new if header["world"] == worlds[world]]
        phases_s = {
            name: round(max(header[name] for header in members) - at, 3)
            for name in ("process_started", "born", "built")
        }
        sizes = (int(old["world_size"]), ranks)
        return measure_change(change, sizes, at, world, commits, phases_s)

    def _newest(self) -> dict[str, Any]:
        return max((log.header for log in self._logs()), key=lambda header: float(header["world"]))

    def _logs(self) -> list[_RankLog]:
        found = []
        for path in self.folder.glob("*.jsonl"):
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1].splitlines()  # the last line may be incomplete
            if whole:
                header, *steps = (json.loads(line) for line in whole)
                found.append(_RankLog(header, tuple(steps)))
        return found


@contextlib.contextmanager
def _training(
    spec: Mapping[str, Any], setting: ElasticSetting, health: RayHealthCheck, size: int
) -> Iterator[_ElasticRun]:
    folder = Path(tempfile.mkdtemp(prefix="bench-elastic-"))
    process = None
    try:
        os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
        with local_cluster.attached(folder):
            cpus = int(spec["parallel"]["dp_shard"]) // size
            cluster = local_cluster.ensure(folder, size, cpus_per_node=cpus, health=health)
            (folder / "commits").mkdir()
            log = folder / "ray_train.log"
            process = _start(spec, setting, size, cluster, folder, log)
            yield _ElasticRun(process, cluster, folder / "commits", log)
    finally:
        if process is not None:
            process.kill()
            process.wait()
        local_cluster.stop(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _start(
    spec: Mapping[str, Any],
    setting: ElasticSetting,
    size: int,
    cluster: LocalCluster,
    folder: Path,
    log: Path,
) -> subprocess.Popen[bytes]:
    ranks = int(spec["parallel"]["dp_shard"])
    storage = Path(cluster.shm_root) / "ray-train" if setting.base.in_memory else folder / "storage"
    storage.mkdir(mode=0o700)
    config = {
        "loop": {
            "spec": spec,
            "folder": str(folder / "commits"),
            "cache_dir": str(cache_folder(os.environ)),
            "every_steps": 1,
            "upload": setting.base.upload,
            "elastic": True,
        },
        "address": cluster.address,
        "storage": str(storage),
        "ranks": (ranks // size, ranks),
        "resize_interval_s": setting.resize_interval_s,
        # As Holdfast's workers have it: gloo binds to loopback alone.
        "environment": {**setting.environment, "GLOO_SOCKET_IFNAME": "lo"},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    marked = {processes.CLUSTER_MARK: cluster.cluster_id}
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ray_train_program", str(path)],
            cwd=ROOT,
            env={**environment(), **cluster.environment(), **setting.environment, **marked},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
