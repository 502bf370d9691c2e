"""Takes an elastic Ray Train job through the loss and the return of a node; leaves nothing behind.

The cluster is Holdfast's embedded one, so that nodes, their CPUs and Ray's settings are the same as
on the other side. Ray Train reads the cluster's nodes every 20 s (`AutoscalingCoordinator`), and
restarts all workers from the newest checkpoint whenever the size changes. A pause here is without
the detection of a new node, because the old world trains on meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.conditions import environment
from benchmarks.figures import AppliedStep
from benchmarks.ray_train_side import BEST, DEFAULT, LOOP, RayTrainSetting, loop_config, trainer
from benchmarks.resizes import nodes
from benchmarks.resizes.changes import Change, MeasuredChange, measure_change
from benchmarks.step_files import StepFiles, phases_since, scratch
from holdfast_service.embedded_cluster import local_cluster
from holdfast_service.embedded_cluster.local_cluster import (
    KeeperOptions,
    LocalCluster,
    RayHealthCheck,
)

START_S = 240.0
CHANGE_S = 300.0


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
        run.settle(ranks, settle_steps, START_S)
        for number in range(rounds):
            yield run.lose_node(number, smaller)
            run.settle(smaller, settle_steps)
            yield run.return_node(ranks)
            run.settle(ranks, settle_steps)


@dataclass(frozen=True)
class _ElasticRun:
    files: StepFiles
    cluster: LocalCluster

    def lose_node(self, number: int, ranks: int) -> MeasuredChange:
        newest = self._newest()
        members = [
            header for header, *_ in self.files.lines() if header["world"] == newest["world"]
        ]
        members.sort(key=lambda header: int(header["rank"]))
        node_id = members[-1 - number % len(members)]["node_id"]

        def lose() -> None:
            local_cluster.kill_node(self.cluster, node_id)

        return self._change(Change.SHRINK, newest, ranks, lose)

    def return_node(self, ranks: int) -> MeasuredChange:
        return self._change(Change.GROW, self._newest(), ranks, lambda: nodes.add(self.cluster))

    def settle(self, ranks: int, steps: int, within_s: float = CHANGE_S) -> None:
        """Wait until the newest world has `ranks` ranks and has made `steps` steps."""

        def has_settled() -> bool:
            newest = [lines for lines in self.files.lines() if lines[0]["world_size"] == ranks]
            world = self._newest()["world"] if newest else None
            return any(len(lines) > steps for lines in newest if lines[0]["world"] == world)

        self.files.wait(has_settled, within_s, f"make {steps} steps with {ranks} ranks")

    def _change(
        self, change: Change, old: Mapping[str, Any], ranks: int, cause: Callable[[], None]
    ) -> MeasuredChange:
        at = time.time()
        cause()
        return self.files.wait(
            lambda: self._measured(change, old, ranks, at),
            CHANGE_S,
            f"make a step with {ranks} ranks after {change.value}",
        )

    def _measured(
        self, change: Change, old: Mapping[str, Any], ranks: int, at: float
    ) -> MeasuredChange | None:
        logs = [*self.files.lines()]
        worlds = sorted({header["world"] for header, *_ in logs})
        new = [
            header
            for header, *_ in logs
            if header["world"] > old["world"] and header["world_size"] == ranks
        ]
        if not new:
            return None
        world = min(header["world"] for header in new)
        commits = [
            AppliedStep(worlds.index(header["world"]), line["step"], line["at"])
            for header, *steps in logs
            for line in steps
        ]
        phases_s = phases_since(at, [header for header in new if header["world"] == world])
        sizes = (int(old["world_size"]), ranks)
        return measure_change(change, sizes, at, worlds.index(world), commits, phases_s)

    def _newest(self) -> dict[str, Any]:
        return max(
            (header for header, *_ in self.files.lines()), key=lambda header: header["world"]
        )


@contextlib.contextmanager
def _training(
    spec: Mapping[str, Any], setting: ElasticSetting, health: RayHealthCheck, size: int
) -> Iterator[_ElasticRun]:
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
    ranks = int(spec["parallel"]["dp_shard"])
    with scratch() as (_, folder):
        try:
            with local_cluster.attached(folder):
                keeper = KeeperOptions(size, cpus_per_node=ranks // size, health=health)
                cluster = local_cluster.ensure(folder, keeper)
                memory = Path(cluster.shm_root) if setting.base.in_memory else folder
                loop = loop_config(spec, setting.base, folder / "steps")
                # As Holdfast's workers have it: gloo binds to loopback alone.
                workers = {**setting.environment, "GLOO_SOCKET_IFNAME": "lo"}
                config = {
                    "function": LOOP,
                    "loop": {**loop, "elastic": True},
                    "storage": str(memory / "ray-train"),
                    "ranks": (ranks // size, ranks),
                    "cluster": {
                        "address": cluster.address,
                        "runtime_env": {"env_vars": workers},
                    },
                    "scaling": {"elastic_resize_monitor_interval_s": setting.resize_interval_s},
                }
                variables = {**cluster.environment(), **setting.environment}
                with trainer(config, cluster.cluster_id, folder, variables) as files:
                    yield _ElasticRun(files, cluster)
        finally:
            local_cluster.stop(folder)
