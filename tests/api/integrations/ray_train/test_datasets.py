"""Shards of real Ray datasets: they reach the ranks, and what was taken before a checkpoint is left
out after it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.data
from ray.data import RandomSeedConfig

from holdfast.integrations.ray_train.counted_shard import CountedShard
from holdfast.integrations.ray_train.datasets import split_over
from holdfast.integrations.ray_train.errors import NotServed
from holdfast.integrations.ray_train.shard_position import EpochCounter, ShardPosition
from holdfast.integrations.ray_train.shipped_datasets import shipped_datasets, write_package

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
ROWS, RANKS, BATCH = 101, 2, 9


@pytest.fixture(scope="module", autouse=True)
def node() -> Iterator[None]:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        address="local",
        object_store_memory=80 << 20,
    )
    yield
    ray.shutdown()


class Rank:
    """One rank of an attempt."""

    def __init__(self, stream: Any, start: ShardPosition, rank: int) -> None:
        self.counter = EpochCounter(start)
        self.shard = CountedShard(stream, self.counter, f"train-{rank}")

    def take(self, way: str, batches: int | None = None) -> tuple[list[int], ShardPosition]:
        """The ids of one epoch, or of its first batches, and the position after them."""
        ids = []
        for batch in islice(_batches(self.shard, way), batches):
            ids += batch
            assert self.counter.is_divided_as_before
            at = self.counter.position
        return ids, self.counter.position if batches is None else at


def attempt(epoch: int, starts: list[ShardPosition]) -> list[Rank]:
    """An order that is another one in each epoch, of blocks of unequal size."""
    numbers = ray.data.range(ROWS, override_num_blocks=7)
    seed = RandomSeedConfig(3, reseed_after_execution=True)
    streams = split_over(RANKS, numbers.randomize_block_order(seed=seed), epoch)
    return [Rank(*both, rank) for rank, both in enumerate(zip(streams, starts, strict=True))]


def together(ranks: list[Rank], way: str, batches: int | None = None) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: rank.take(way, batches), ranks))


@pytest.mark.parametrize("way", ["torch", "rows", "shuffled", "blocks"])
def test_an_interrupted_epoch_goes_on_behind_the_rows_that_were_taken(way: str) -> None:
    first = attempt(0, [ShardPosition()] * RANKS)
    for ids, position in (whole := together(first, way)):
        assert (len(set(ids)), position) == (ROWS // RANKS, ShardPosition(1))
    before = together(first, way, 11 if way == "rows" else 2)
    starts = [position for _, position in before]
    assert [start.rows for start in starts] == [len(ids) for ids, _ in before]
    assert all(start.blocks for start in starts) or way == "rows", "whole blocks were taken"
    second = attempt(1, starts)
    after = together(second, way)
    seen = [a + b for (a, _), (b, _) in zip(before, after, strict=True)]
    assert all(len(each) == ROWS // RANKS for each in seen)
    assert len({*seen[0], *seen[1]}) == 2 * (ROWS // RANKS)
    assert [ids for ids, _ in whole] != seen, "the order of this epoch is its own"
    assert [position for _, position in after] == [ShardPosition(2)] * RANKS
    if way == "torch":  # the epochs after it are whole
        assert [len(ids) for ids, _ in together(second, way)] == [ROWS // RANKS] * RANKS


def test_datasets_of_a_trainer_reach_rank_0_as_lineage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = ray.data.range(5).map(lambda row: {"square": row["id"] ** 2})
    write_package(None, {"train": numbers, "eval": lambda: ray.data.range(3)}, tmp_path)
    monkeypatch.chdir(tmp_path)
    made = shipped_datasets()
    assert [row["square"] for row in made["train"].take_all()] == [0, 1, 4, 9, 16]
    assert made["eval"].count() == 3
    with pytest.raises(NotServed, match=r"datasets\['train'\].*in the memory"):
        write_package(None, {"train": ray.data.from_items([1])}, tmp_path)


def _batches(shard: CountedShard, way: str) -> Any:
    if way == "rows":
        return ([row["id"]] for row in shard.iter_rows())
    if way == "torch":
        batches = shard.iter_torch_batches(batch_size=BATCH, prefetch_batches=3)
    elif way == "shuffled":
        batches = shard.iter_batches(batch_size=BATCH, local_shuffle_buffer_size=20)
    else:
        batches = shard.iter_batches(batch_size=None if way == "blocks" else BATCH)
    return (batch["id"].tolist() for batch in batches)
