"""An elastic Ray Train job. Ray Train reads the cluster's nodes every 20 s
(`AutoscalingCoordinator`), and restarts all workers from the newest checkpoint whenever the size
changes. A pause here is without the detection of a new node, because the old world trains on
meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import ray_train_side
from benchmarks.conditions import environment
from benchmarks.figures import AppliedStep, Recovery, recovery
from benchmarks.holdfast_side import present_cluster
from benchmarks.ray_train_side import RayTrainSetting
from benchmarks.resizes.changes import Sizes
from benchmarks.step_files import StepFiles, phases_since
from holdfast_service.embedded_cluster import local_cluster
from holdfast_service.embedded_cluster.local_cluster import (
    KeeperOptions,
    LocalCluster,
    RayHealthCheck,
)

CHANGE_S = 300.0


@dataclass(frozen=True)
class RayTrainWorld:
    files: StepFiles
    folder: Path
    """The data directory of the embedded cluster."""

    @property
    def cluster(self) -> LocalCluster:
        return present_cluster(self.folder)

    @classmethod
    @contextlib.contextmanager
    def training(
        cls, spec: dict[str, Any], setting: RayTrainSetting, sizes: Sizes, health: RayHealthCheck
    ) -> Iterator[RayTrainWorld]:
        """Train on an embedded cluster, so that nodes, their CPUs and Ray's settings are the same
        as on the other side. `spec` has the largest mesh."""
        os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
        loop = partial(ray_train_side.loop_config, spec, setting, elastic=True)
        ranks = (sizes.ranks_per_node, sizes.ranks)
        with (
            tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as name,
            contextlib.ExitStack() as at_end,
        ):
            folder = Path(name)
            at_end.callback(local_cluster.stop, folder)
            at_end.enter_context(local_cluster.attached(folder))
            keeper = KeeperOptions(sizes.nodes, cpus_per_node=sizes.ranks_per_node, health=health)
            cluster = local_cluster.ensure(folder, keeper)
            with ray_train_side.training(
                ray_train_side.LOOP, loop, setting, ranks, cluster
            ) as files:
                yield cls(files, folder)

    def members(self) -> list[tuple[str, int]]:
        headers = self._headers()
        newest = [each for each in headers if each["world"] == headers[-1]["world"]]
        newest.sort(key=lambda header: int(header["rank"]))
        return [(header["node_id"], header["pid"]) for header in newest]

    def settle(self, ranks: int, steps: int) -> None:
        """Wait until the newest world has `ranks` ranks and has made `steps` steps."""

        def has_settled() -> bool:
            logs = [*self.files.lines()]
            world = max((header["world"] for header, *_ in logs), default=0.0)
            newest = [lines for lines in logs if lines[0]["world"] == world]
            return any(lines[0]["world_size"] == ranks and len(lines) > steps for lines in newest)

        self.files.wait(has_settled, CHANGE_S, f"make {steps} steps with {ranks} ranks")

    def recovery_from(self, cause: Callable[[], object], ranks: int) -> Recovery:
        old, at = self._headers()[-1]["world"], time.time()
        cause()
        return self.files.wait(
            lambda: self._recovery(old, ranks, at), CHANGE_S, f"make a new step with {ranks} ranks"
        )

    def resize(self, nodes: int) -> None:
        raise NotImplementedError(f"Ray Train takes no order of a size, as {nodes} nodes")

    def _recovery(self, old: float, ranks: int, at: float) -> Recovery | None:
        headers = [each for each in self._headers() if each["world"] > old]
        new = [each for each in headers if each["world_size"] == ranks]
        if not new:
            return None
        worlds = sorted({header["world"] for header in self._headers()})
        steps = [
            AppliedStep(worlds.index(header["world"]), line["step"], line["at"])
            for header, *lines in self.files.lines()
            for line in lines
        ]
        first = new[0]["world"]
        phases_s = phases_since(at, [each for each in new if each["world"] == first])
        return recovery(steps, at, worlds.index(first), phases_s=phases_s)

    def _headers(self) -> list[dict[str, Any]]:
        """Return the headers of all processes, those of the oldest world first."""
        headers = (header for header, *_ in self.files.lines())
        return sorted(headers, key=lambda header: float(header["world"]))
