"""Runs one `TorchTrainer` until it is killed, on a Ray cluster of its own or on a given one.

    python -m benchmarks.ray_train_program CONFIG.json

`benchmarks.ray_train_side` and `benchmarks.resizes.ray_train_changes` start this program and end it
with all its child processes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from benchmarks.ray_train_loop import train_function


@dataclass(frozen=True)
class ProgramConfig:
    loop: dict[str, Any]
    ray_temp_dir: str
    storage: str
    ranks: int
    cpus: int


@dataclass(frozen=True)
class ElasticConfig:
    """A trainer on an existing cluster. `environment` is that of its workers."""

    loop: dict[str, Any]
    address: str
    storage: str
    ranks: tuple[int, int]
    resize_interval_s: float
    environment: dict[str, str]


def main(path: str) -> None:
    fields = json.loads(Path(path).read_text())
    if "address" in fields:
        _fit_elastic(ElasticConfig(**fields))
    else:
        _fit(ProgramConfig(**fields))


def _fit(config: ProgramConfig) -> None:
    ray.init(
        num_cpus=config.cpus,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        _temp_dir=config.ray_temp_dir,
        log_to_driver=True,
    )
    _train(config.loop, ScalingConfig(num_workers=config.ranks), config.storage)


def _fit_elastic(config: ElasticConfig) -> None:
    ray.init(
        address=config.address,
        log_to_driver=True,
        runtime_env={"env_vars": config.environment},
    )
    least, most = config.ranks
    scaling = ScalingConfig(
        num_workers=(least, most),
        elastic_resize_monitor_interval_s=config.resize_interval_s,
    )
    _train(config.loop, scaling, config.storage)


def _train(loop: dict[str, Any], scaling: ScalingConfig, storage: str) -> None:
    trainer = TorchTrainer(
        train_function,
        train_loop_config=loop,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=scaling,
        run_config=RunConfig(
            name="run",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main(sys.argv[1])
