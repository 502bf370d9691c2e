"""Runs one `TorchTrainer` until it is killed, on a Ray cluster of its own or on a given one.

    python -m benchmarks.ray_train_program CONFIG.json

`benchmarks.ray_train_side` starts this program and ends it with all its child processes.
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


@dataclass(frozen=True)
class TrainerConfig:
    """`cluster`: arguments of `ray.init`; `scaling`: of `ScalingConfig`, beside `num_workers`, the
    least and the greatest number."""

    function: str
    """`module:function`, which trains one rank."""
    loop: dict[str, Any]
    storage: str
    ranks: tuple[int, int]
    cluster: dict[str, Any]
    scaling: dict[str, Any]


def main(path: str) -> None:
    config = TrainerConfig(**json.loads(Path(path).read_text()))
    module, name = config.function.split(":")
    ray.init(log_to_driver=True, **config.cluster)
    least, most = config.ranks
    TorchTrainer(
        getattr(importlib.import_module(module), name),
        train_loop_config=config.loop,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=most if least == most else (least, most), **config.scaling
        ),
        run_config=RunConfig(
            name="run",
            storage_path=config.storage,
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1])
