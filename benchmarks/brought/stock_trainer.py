"""Runs the Ray Train function in a stock `TorchTrainer`, on a Ray cluster of its own, until it is
killed.

    python -m benchmarks.brought.stock_trainer CONFIG.json
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

CPUS = 8
"""Advertised by the raylet: more than needed, so that no rank waits for a CPU."""
OBJECT_STORE_BYTES = 80 << 20


@dataclass(frozen=True)
class StockConfig:
    loop: dict[str, Any]
    ray_temp_dir: str
    storage: str
    ranks: int


def main(path: str) -> None:
    function = importlib.import_module("ray_function")  # by PYTHONPATH, as in the workers
    config = StockConfig(**json.loads(Path(path).read_text()))
    ray.init(
        num_cpus=CPUS,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=config.ray_temp_dir,
    )
    TorchTrainer(
        function.train_loop_per_worker,
        train_loop_config=config.loop,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=config.ranks),
        run_config=RunConfig(
            name="run",
            storage_path=config.storage,
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1])
