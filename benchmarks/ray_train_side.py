"""Ray Train on a fresh cluster of its own, or on a given one; leaves no process behind.

Two settings are measured. `default` follows Ray Train's guide. `best` has every option found in
Ray 2.60 that makes a restart faster without changing its result. Warm processes are not among them:
Ray starts only as many idle processes as there are cores, and Ray Train's workers inherit a runtime
environment from its controller that matches none of these, so each restart starts new processes and
imports everything again.

    python -m benchmarks.ray_train_side CONFIG.json

runs one `TorchTrainer` until it is killed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.conditions import world_size
from benchmarks.figures import Recovery
from benchmarks.step_files import StepFiles, scratch, started
from holdfast_service.embedded_cluster.local_cluster import LocalCluster
from holdfast_workers.node_cache.cached_file import cache_folder

LOOP = "benchmarks.ray_train_loop:train_function"
OBJECT_STORE_BYTES = 80 << 20
CPUS = 8
"""CPUs advertised by its own raylet: more than needed, so that no rank waits for a CPU."""


@dataclass(frozen=True)
class RayTrainSetting:
    """One configuration of Ray Train, printed with the figures."""

    name: str
    in_memory: bool
    """True: the state is written to its final folder in /dev/shm. False: to a temporary folder that
    `report()` copies to storage on disk, as its guide shows."""
    elastic_resize_monitor_interval_s: float
    """Of its look for a better size while it trains."""
    environment: Mapping[str, str] = field(default_factory=dict)
    elastic_environment: Mapping[str, str] = field(default_factory=dict)
    """Where the number of ranks may change."""


DEFAULT = RayTrainSetting("default", False, 60.0)
_QUICK = {  # read by Ray Train's controller and workers, and by its torch backend
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",  # 2 s by default: its poll of the workers
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "1",  # 30 by default
    "RAY_worker_niceness": "0",  # 15 by default
}
# 60 by default. After a loss it first tries the old size as long as its view of the nodes is old.
_GIVES_UP = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "2"}
BEST = RayTrainSetting("best", True, 1.0, _QUICK, _GIVES_UP)
SETTINGS = {setting.name: setting for setting in (DEFAULT, BEST)}


def measure(spec: dict[str, Any], setting: RayTrainSetting, rank: int, after_step: int) -> Recovery:
    """Start, kill `rank` after `after_step` applied steps, wait for the first step beyond."""
    ranks = world_size(spec)
    loop = partial(loop_config, spec, setting)
    with training(LOOP, loop, setting, (ranks, ranks)) as files:
        return files.measure([rank], ranks, after_step)[0]


def loop_config(
    spec: Mapping[str, Any], setting: RayTrainSetting, steps: Path, *, elastic: bool = False
) -> dict[str, Any]:
    """The configuration of `benchmarks.ray_train_loop`, whose ranks write to `steps`."""
    return {
        "spec": spec,
        "folder": str(steps),
        "cache_dir": str(cache_folder(os.environ)),
        "in_memory": setting.in_memory,
        "elastic": elastic,
    }


@contextlib.contextmanager
def training(
    function: str,
    loop: Callable[[Path], dict[str, Any]],
    setting: RayTrainSetting,
    ranks: tuple[int, int],
    cluster: LocalCluster | None = None,
) -> Iterator[StepFiles]:
    """Run `function` (`module:function`) in the least to the greatest number of `ranks`, on
    `cluster` or on a raylet of its own; `loop` makes its configuration from the steps' folder."""
    with (
        scratch() as folder,
        tempfile.TemporaryDirectory(
            prefix="bench-", dir="/dev/shm", ignore_cleanup_errors=True
        ) as memory,
    ):
        storage = (Path(memory) if setting.in_memory else folder) / "ray-train"
        storage.mkdir(mode=0o700)
        variables, mark = {**setting.environment}, ""
        cluster_options: dict[str, Any] = {
            "num_cpus": CPUS,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": str(folder / "ray"),
        }
        if cluster is not None:
            mark = cluster.cluster_id
            variables |= setting.elastic_environment
            # As Holdfast's workers have it: gloo binds to loopback alone.
            workers = {"env_vars": {**variables, "GLOO_SOCKET_IFNAME": "lo"}}
            cluster_options = {"address": cluster.address, "runtime_env": workers}
            variables |= cluster.environment()
        config = {
            "function": function,
            "loop": loop(folder / "steps"),
            "storage": str(storage),
            "ranks": ranks,
            "cluster": cluster_options,
            "resize_interval_s": setting.elastic_resize_monitor_interval_s,
        }
        path = folder / "config.json"
        path.write_text(json.dumps(config))
        command = (sys.executable, "-m", "benchmarks.ray_train_side", str(path))
        with started(command, folder, variables, mark) as files:
            yield files


def main(config: Mapping[str, Any]) -> None:
    import ray  # heavy, and the measuring process has no use for it
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    module, name = config["function"].split(":")
    ray.init(log_to_driver=True, **config["cluster"])
    least, most = config["ranks"]
    scaling = ScalingConfig(num_workers=most)
    if least < most:
        scaling = ScalingConfig(
            num_workers=(least, most), elastic_resize_monitor_interval_s=config["resize_interval_s"]
        )
    TorchTrainer(
        getattr(importlib.import_module(module), name),
        train_loop_config=config["loop"],
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=scaling,
        run_config=RunConfig(
            name="run",
            storage_path=config["storage"],
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
