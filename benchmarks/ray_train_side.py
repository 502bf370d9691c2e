"""Starts Ray Train on a fresh cluster, or on a given one, and measures one SIGKILL under it; leaves
no process behind.

Two settings are measured. `default` follows Ray Train's guide. `best` has every option found in
Ray 2.60 that makes a restart faster without changing its result. Warm processes are not among them:
Ray starts only as many idle processes as there are cores, and Ray Train's workers inherit a runtime
environment from its controller that matches none of these, so each restart starts new processes and
imports everything again.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.conditions import environment, world_size
from benchmarks.figures import MeasuredFault
from benchmarks.step_files import StepFiles, memory_folder, ray_folder, scratch, started
from holdfast_workers.node_cache.cached_file import cache_folder

LOOP = "benchmarks.ray_train_loop:train_function"
OBJECT_STORE_BYTES = 80 << 20
CPUS = 8
"""CPUs advertised by the raylet: more than needed, so that no rank waits for a CPU."""


@dataclass(frozen=True)
class RayTrainSetting:
    """One configuration of Ray Train. `why` is printed with the figures."""

    name: str
    why: str
    upload: bool
    in_memory: bool
    environment: Mapping[str, str] = field(default_factory=dict)


DEFAULT = RayTrainSetting(
    name="default",
    why="default settings; state by report() of a temporary folder to storage on disk",
    upload=True,
    in_memory=False,
)
_QUICK = {  # read by Ray Train's controller and workers, and by its torch backend
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",  # 2 s by default: its poll of the workers
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "1",  # 30 by default
    "RAY_worker_niceness": "0",  # 15 by default
}
BEST = RayTrainSetting(
    name="best",
    why="workers polled every 0.1 s instead of 2, watchers and metrics off, normal priority; "
    "state written directly to its final folder in /dev/shm",
    upload=False,
    in_memory=True,
    environment=_QUICK,
)
SETTINGS = (DEFAULT, BEST)


def measure(
    spec: dict[str, Any], setting: RayTrainSetting, rank: int, after_step: int
) -> MeasuredFault:
    """Start, kill `rank` after `after_step` applied steps, wait for the first step beyond."""
    ranks = world_size(spec)
    with running(LOOP, lambda folder: loop_config(spec, setting, folder), ranks, setting) as run:
        return run.measure([rank], ranks, after_step)[0]


def loop_config(spec: Mapping[str, Any], setting: RayTrainSetting, steps: Path) -> dict[str, Any]:
    """The configuration of `benchmarks.ray_train_loop`, whose ranks write to `steps`."""
    return {
        "spec": spec,
        "folder": str(steps),
        "cache_dir": str(cache_folder(os.environ)),
        "upload": setting.upload,
    }


@contextlib.contextmanager
def running(
    function: str,
    loop: Callable[[Path], dict[str, Any]],
    ranks: int,
    setting: RayTrainSetting,
    import_path: str = "",
) -> Iterator[StepFiles]:
    """`function` on a cluster of its own. `loop`: its configuration, by the folder of the steps."""
    with scratch() as (mark, folder):
        storage = memory_folder(mark) if setting.in_memory else folder / "storage"
        config = {
            "function": function,
            "loop": loop(folder / "steps"),
            "storage": str(storage),
            "ranks": (ranks, ranks),
            "cluster": {
                "num_cpus": CPUS,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_temp_dir": str(ray_folder(mark)),
            },
            "scaling": {},
        }
        variables = {**setting.environment}
        if import_path:
            variables["PYTHONPATH"] = f"{import_path}:{environment()['PYTHONPATH']}"
        with trainer(config, mark, folder, variables) as files:
            yield files


@contextlib.contextmanager
def trainer(
    config: Mapping[str, Any], mark: str, folder: Path, variables: Mapping[str, str]
) -> Iterator[StepFiles]:
    """Run `benchmarks.ray_train_program`, whose `TrainerConfig` is `config`."""
    Path(config["storage"]).mkdir(mode=0o700)
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    command = (sys.executable, "-m", "benchmarks.ray_train_program", str(path))
    with started(command, mark, folder, variables) as files:
        yield files
