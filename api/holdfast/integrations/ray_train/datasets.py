"""The shards of Ray datasets: made once by rank 0, split over the ranks, resumed where the
checkpoint's report found them.

Each rank is a client of the Ray cluster. Rank 0 owns the datasets and their split; when it ends,
Ray ends their tasks, and the next attempt makes them anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from holdfast.integrations.ray_train import shard_position
from holdfast.integrations.ray_train.errors import FunctionUnusable, NotServed
from holdfast.integrations.ray_train.rank_group import RankGroup
from holdfast.integrations.ray_train.rank_place import ClusterPlace
from holdfast.integrations.ray_train.shard_position import (
    EpochCounter,
    ShardPosition,
    ShardStart,
    start_of,
)

_log = structlog.get_logger()


@dataclass(frozen=True)
class DatasetSource:
    """Where the datasets of a run come from."""

    make: Callable[[], Any]
    """Returns them by name."""
    reference: str
    cluster: ClusterPlace
    job_id: str
    free_cpus_s: float


class DatasetShards:
    """The shards of one rank."""

    def __init__(self) -> None:
        self._shards: dict[str, Any] = {}
        self._counters: dict[str, EpochCounter] = {}

    @property
    def positions(self) -> dict[str, ShardPosition]:
        """This rank's position in each dataset."""
        return {name: counter.position for name, counter in self._counters.items()}

    def open(self, source: DatasetSource, group: RankGroup, checkpoint: Path | None) -> None:
        """Make the shards, on all ranks at once. `checkpoint`: the folder of the checkpoint that
        the run goes on from. Raises FunctionUnusable, ClusterUnusable, StorageUnusable."""
        # Late: only runs with datasets load Ray Data.
        from ray import cloudpickle

        from holdfast.integrations.ray_train import ray_client
        from holdfast.integrations.ray_train.counted_shard import CountedShard

        is_first = group.rank == 0
        ray_client.connect(source.cluster, source.job_id, ships_code=is_first)
        made = b""
        if is_first:
            ray_client.wait_for_free_cpu(source.free_cpus_s)
            made = cloudpickle.dumps(_split(source, group.size, checkpoint))
        splits: dict[str, _SplitDataset] = cloudpickle.loads(group.from_rank_zero(made))
        for name, split in splits.items():
            counter = EpochCounter(split.start.positions[group.rank])
            self._counters[name] = counter
            self._shards[name] = CountedShard(
                split.streams[group.rank], counter, f"{name}-{group.rank}"
            )

    def of(self, name: str | None) -> Any:
        """The shard of a dataset. Raises NotServed, FunctionUnusable."""
        if name is None:
            return None
        if name in self._shards:
            return self._shards[name]
        if self._shards:
            raise FunctionUnusable(
                f"get_dataset_shard({name!r}): the run has the datasets {', '.join(self._shards)}"
            )
        raise NotServed(
            f"get_dataset_shard({name!r}): the run has no datasets: name a function that makes "
            "them in `ray_run.datasets`, or give them to TorchTrainer(datasets=...)"
        )


@dataclass(frozen=True)
class _SplitDataset:
    streams: list[Any]
    """The iterators of Ray Data, by rank."""
    start: ShardStart


def _split(source: DatasetSource, ranks: int, checkpoint: Path | None) -> dict[str, _SplitDataset]:
    """Make the datasets and split each of them. Called on rank 0."""
    stored = shard_position.read(checkpoint) if checkpoint else {}
    found: dict[str, _SplitDataset] = {}
    for name, dataset in _made(source).items():
        start = start_of(stored.get(name, ()), ranks)
        if start.repeated:
            _log.warning(
                "an epoch begins again: the number of ranks has changed",
                dataset=name,
                epoch=start.epoch,
                rows_seen_again=start.repeated,
            )
        found[name] = _SplitDataset(split_over(ranks, dataset, start.epoch), start)
    return found


def split_over(ranks: int, dataset: Any, epoch: int) -> list[Any]:
    """The shards of a dataset by rank, as iterators of Ray Data. Their order is the same each time
    they are made, and orders that differ by epoch go on from `epoch`."""
    context = dataset.context
    context.execution_options.preserve_order = True
    context._execution_idx = epoch
    return list(dataset.streaming_split(ranks, equal=True, locality_hints=None))


def _made(source: DatasetSource) -> Mapping[str, Any]:
    from ray.data import Dataset  # late, as above

    found = source.make()
    if not isinstance(found, Mapping) or not found:
        raise FunctionUnusable(
            f"{source.reference} returned a {type(found).__name__}: return the datasets by name, "
            'such as {"train": ray.data.read_parquet(...)}'
        )
    for name, dataset in found.items():
        if not isinstance(name, str) or not isinstance(dataset, Dataset):
            raise FunctionUnusable(
                f"{source.reference} returned a {type(dataset).__name__} as {name!r}: return "
                "ray.data.Dataset objects"
            )
    return found
