"""Starts its own Ray cluster with one `TorchTrainer` and runs until it is killed.

    python -m benchmarks.ray_train_program CONFIG.json

`benchmarks.ray_train_side` starts this program and ends it with all its child processes.
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


def main(path: str) -> None:
    config = ProgramConfig(**json.loads(Path(path).read_text()))
    ray.init(
        num_cpus=config.cpus,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        _temp_dir=config.ray_temp_dir,
        log_to_driver=True,
    )
    trainer = TorchTrainer(
        train_function,
        train_loop_config=config.loop,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=config.ranks),
        run_config=RunConfig(
            name="run",
            storage_path=config.storage,
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main(sys.argv[1])
