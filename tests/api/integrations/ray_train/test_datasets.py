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
from ray.util.placement_group import placement_group, remove_placement_group
from tests.support.waiting import DEADLINE_S

from holdfast.integrations.ray_train.counted_shard import CountedShard
from holdfast.integrations.ray_train.datasets import split_over
from holdfast.integrations.ray_train.errors import ClusterUnusable, NotServed
from holdfast.integrations.ray_train.ray_client import wait_for_free_cpu
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


def streams(epoch: int, *, reseed: bool) -> list[Any]:
    """An order of blocks of unequal size. `reseed`: it is another one in each epoch."""
    numbers = ray.data.range(ROWS, override_num_blocks=7)
    seed = RandomSeedConfig(3, reseed_after_execution=reseed)
    return split_over(RANKS, numbers.randomize_block_order(seed=seed), epoch)


def attempt(shards: list[Any], starts: list[ShardPosition]) -> list[Rank]:
    return [Rank(*both, rank) for rank, both in enumerate(zip(shards, starts, strict=True))]


def together(ranks: list[Rank], way: str, batches: int | None = None) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: rank.take(way, batches), ranks))


def check_once(before: list[Any], after: list[Any]) -> list[list[int]]:
    """All rows were seen once, and the position is the next epoch; what each rank saw."""
    seen = [a + b for (a, _), (b, _) in zip(before, after, strict=True)]
    assert all(len(each) == ROWS // RANKS for each in seen)
    assert len({*seen[0], *seen[1]}) == 2 * (ROWS // RANKS)
    for (_, start), (_, end) in zip(before, after, strict=True):
        assert end == ShardPosition(start.epoch + 1)
    return seen


def test_a_restart_goes_on_in_the_order_of_the_interrupted_epoch() -> None:
    first = attempt(streams(0, reseed=True), [ShardPosition()] * RANKS)
    whole = together(first, "torch")
    assert [position for _, position in whole] == [ShardPosition(1)] * RANKS
    before = together(first, "torch", 2)
    starts = [position for _, position in before]
    assert [(start.epoch, start.rows) for start in starts] == [(1, 2 * BATCH)] * RANKS
    assert all(start.blocks for start in starts), "whole blocks were taken"
    second = attempt(streams(1, reseed=True), starts)
    seen = check_once(before, together(second, "torch"))
    assert [ids for ids, _ in whole] != seen, "the order of this epoch is its own"
    assert [len(ids) for ids, _ in together(second, "torch")] == [ROWS // RANKS] * RANKS


@pytest.fixture(scope="module")
def same_each_epoch() -> list[Any]:
    return streams(0, reseed=False)


@pytest.mark.parametrize(
    "way",
    [
        "rows",
        pytest.param("shuffled", marks=pytest.mark.soak),
        pytest.param("blocks", marks=pytest.mark.soak),
    ],
)
def test_each_way_to_iterate_leaves_out_the_rows_that_were_taken(
    same_each_epoch: list[Any], way: str
) -> None:
    first = attempt(same_each_epoch, [ShardPosition()] * RANKS)
    before = together(first, way, 11 if way == "rows" else 2)
    starts = [position for _, position in before]
    assert [start.rows for start in starts] == [len(ids) for ids, _ in before]
    check_once(before, together(attempt(same_each_epoch, starts), way))


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


def test_a_cluster_without_a_free_cpu_is_named_after_the_deadline() -> None:
    wait_for_free_cpu(30.0)
    group = placement_group([{"CPU": 2}])
    assert group.wait(DEADLINE_S)
    try:
        with pytest.raises(ClusterUnusable, match="for 1 s jobs had reserved all"):
            wait_for_free_cpu(1.0)
    finally:
        remove_placement_group(group)


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
