"""A Ray Train function that reads Ray datasets as users write it, and names nothing of Holdfast."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray.data
import ray.train
from ray.train import Checkpoint

ROWS = 120
BLOCKS = 7


def datasets() -> dict[str, ray.data.Dataset]:
    """Numbers from 0, in blocks of unequal size, whose order is shuffled."""
    numbers = ray.data.range(ROWS, override_num_blocks=BLOCKS)
    return {
        "train": numbers.randomize_block_order(seed=7).map_batches(doubled),
        "eval": ray.data.range(10),
    }


def doubled(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {**batch, "double": 2 * batch["id"]}


def read_numbers(config: dict[str, Any]) -> dict[str, Any]:
    """Goes through epochs, and reports every second batch with all numbers that it has seen, by
    epoch. Returns those of rank 0.

    `kills`: a list of [rank, epoch, batch, attempt]; that rank kills itself there. `way`: how it
    iterates. The numbers of each rank end up in its part of the last checkpoint.
    """
    rank = ray.train.get_context().get_world_rank()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    shard = ray.train.get_dataset_shard("train")
    seen: list[list[int]] = []
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        seen = json.loads((Path(checkpoint.path) / f"seen-{rank}.json").read_text())
    for epoch in range(max(0, len(seen) - 1), config["epochs"]):
        if len(seen) == epoch:
            seen.append([])
        for number, ids in enumerate(_batches(shard, config.get("way", "batches"))):
            if [rank, epoch, number, attempt] in config.get("kills", []):
                os.kill(os.getpid(), signal.SIGKILL)
            seen[epoch].extend(ids)
            if number % 2:
                _report(rank, epoch, seen)
        _report(rank, epoch, seen)
    return {"eval": sorted(row["id"] for row in ray.train.get_dataset_shard("eval").iter_rows())}


def _batches(shard: Any, way: str) -> Any:
    if way == "rows":
        return ([row["id"]] for row in shard.iter_rows())
    if way == "torch":
        batches = shard.iter_torch_batches(batch_size=9, drop_last=False)
    elif way == "shuffled":
        batches = shard.iter_batches(batch_size=9, local_shuffle_buffer_size=20)
    else:
        batches = shard.iter_batches(batch_size=9)
    return (batch["id"].tolist() for batch in batches)


def _report(rank: int, epoch: int, seen: list[list[int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"seen-{rank}.json").write_text(json.dumps(seen))
        metrics = {"epoch": epoch, "rows": sum(map(len, seen))}
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))
