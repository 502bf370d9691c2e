"""Each token of an epoch is a target once, in an order that no number of ranks changes."""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.data import sample_order
from holdfast_workers.data.sample_order import Indices, micro_batch_positions, passes
from holdfast_workers.data.token_order import SourceShards, TokenOrder
from holdfast_workers.data.token_set import ShardFacts, TokenizerFacts, TokenSet

SEEDS = st.integers(min_value=0, max_value=2**63)
SIZES = st.lists(st.lists(st.integers(2, 40), min_size=1, max_size=6), min_size=1, max_size=4)
SHUFFLED = st.integers(1, 400)
LENGTH = st.integers(1, 9)


def order_of(
    sizes: Sequence[Sequence[int]],
    *,
    weights: Sequence[float] | None = None,
    length: int = 4,
    seed: int = 7,
    shuffled: int = 100,
) -> TokenOrder:
    """Of shards with these numbers of tokens, each two bytes."""
    sources = [SourceShards(each, [2 * tokens for tokens in each]) for each in sizes]
    return TokenOrder(sources, weights, length, seed, shuffled)


def token_set_of(sizes: Sequence[int]) -> TokenSet:
    """The manifest of a source with shards of these numbers of tokens."""
    shards = tuple(ShardFacts("", 2 * tokens, tokens, 1) for tokens in sizes)
    return TokenSet("/a", "text", TokenizerFacts("bytes", "", 256, 0), shards, 1, 1)


def targets(order: TokenOrder, samples: Indices) -> Counter[tuple[int, int]]:
    """The tokens (shard, number) that are targets of the samples, each with its count."""
    shards, starts = order.windows_of(samples)
    counts = order.targets_of(samples)
    return Counter(
        (shard, start + 1 + place)
        for shard, start, count in zip(
            shards.tolist(), starts.tolist(), counts.tolist(), strict=True
        )
        for place in range(count)
    )


@given(sizes=SIZES, length=LENGTH, seed=SEEDS, shuffled=SHUFFLED, epoch=st.integers(0, 9))
def test_without_weights_an_epoch_has_each_token_once(
    sizes: list[list[int]], length: int, seed: int, shuffled: int, epoch: int
) -> None:
    order = order_of(sizes, length=length, seed=seed, shuffled=shuffled)
    assert order.samples == sum(token_set_of(each).samples(length) for each in sizes)
    positions = np.arange(epoch * order.samples, (epoch + 1) * order.samples)
    tokens = [size for each in sizes for size in each]
    expected = {(shard, n): 1 for shard, size in enumerate(tokens) for n in range(1, size)}
    samples = order.samples_at(positions)
    assert targets(order, samples) == expected
    assert sorted(samples.tolist()) == list(range(order.samples))
    assert (order.targets_of(samples) >= 1).all()


@given(sizes=SIZES, seed=SEEDS, shuffled=SHUFFLED, data=st.data())
def test_with_weights_each_source_has_epochs_of_its_own(
    sizes: list[list[int]], seed: int, shuffled: int, data: st.DataObject
) -> None:
    weights = data.draw(
        st.lists(st.integers(1, 9).map(float), min_size=len(sizes), max_size=len(sizes))
    )
    order = order_of(sizes, weights=weights, seed=seed, shuffled=shuffled)
    samples = order.samples_at(np.arange(3 * order.samples))
    sources = order.source_of(samples)
    for source in range(len(sizes)):
        read = samples[sources == source]
        own = sum(-(-(size - 1) // 4) for size in sizes[source])
        for epoch in range(len(read) // own):
            of_epoch = read[epoch * own : (epoch + 1) * own]
            assert len(set(of_epoch.tolist())) == own
        assert order.epochs_before(3 * order.samples)[source] == len(read) / own
        share = order.mixture.weights[source] / order.mixture.total
        assert abs(len(read) - 3 * order.samples * share) < max(1, order.mixture.depth)


@given(sizes=SIZES, data_parallel=st.integers(1, 9), micro_batch=st.integers(1, 3))
def test_ranks_of_any_number_read_the_same_samples(
    sizes: list[list[int]], data_parallel: int, micro_batch: int
) -> None:
    order, global_batch = order_of(sizes, weights=[1.0] * len(sizes)), micro_batch * 6
    whole = order.samples_at(np.arange(2 * global_batch, 3 * global_batch))
    read = np.concatenate(
        [
            order.samples_at(
                micro_batch_positions(
                    2,
                    index,
                    data_index=rank,
                    data_parallel=data_parallel,
                    micro_batch=micro_batch,
                    global_batch=global_batch,
                )
            )
            for index in range(passes(global_batch, micro_batch, data_parallel))
            for rank in range(data_parallel)
        ]
    )
    assert read.tolist() == whole.tolist()


@given(sizes=SIZES, seed=SEEDS, shuffled=SHUFFLED, mixed=st.booleans(), first=st.integers(0, 300))
def test_a_pool_reads_one_group_after_the_other(
    sizes: list[list[int]], seed: int, shuffled: int, mixed: bool, first: int
) -> None:
    weights = [1.0] * len(sizes) if mixed else None
    order = order_of(sizes, weights=weights, seed=seed, shuffled=shuffled)
    nbytes = [2 * size for each in sizes for size in each]
    positions = np.arange(first, first + 2 * order.samples)
    samples = order.samples_at(positions)
    shards, pools = order.windows_of(samples)[0], order.source_of(samples)
    followed = [*order.groups_from(first)]
    assert [group.begin for group in followed] == sorted(group.begin for group in followed)
    for number, own in enumerate(sizes if mixed else [nbytes]):
        groups = [group for group in followed if group.pool == number]
        assert len({shard for group in groups for shard in group.shards}) == len(own)
        for group, then in pairwise(groups):
            after = (group.epoch, group.number + 1), (group.epoch + 1, 0)
            assert (then.epoch, then.number) in after
        for group in groups:
            own_bytes = order.group_bytes(number, shuffled)
            assert sum(nbytes[shard] for shard in group.shards) <= own_bytes or (
                len(group.shards) == 1
            )
        of_pool = pools == number if mixed else pools >= 0
        for position, shard in zip(
            positions[of_pool].tolist(), shards[of_pool].tolist(), strict=True
        ):
            if position >= groups[0].begin and len(groups) > 1 and position >= groups[1].begin:
                groups = groups[1:]
            if len(groups) == 1:
                break  # what follows is not listed
            assert order.places_at(position)[number] == (groups[0].epoch, groups[0].number)
            assert shard in groups[0].shards


@given(sizes=SIZES, seed=SEEDS, shuffled=SHUFFLED, mixed=st.booleans(), data=st.data())
def test_samples_are_of_the_groups_at_their_positions(
    sizes: list[list[int]], seed: int, shuffled: int, mixed: bool, data: st.DataObject
) -> None:
    weights = [1.0] * len(sizes) if mixed else None
    order = order_of(sizes, weights=weights, seed=seed, shuffled=shuffled)
    start, count = data.draw(st.integers(0, 500)), data.draw(st.integers(1, 80))
    shards, _ = order.windows_of(order.samples_at(np.arange(start, start + count)))
    groups = order.groups_between(start, start + count)
    assert set(shards.tolist()) <= {shard for group in groups for shard in group.shards}
    assert all(group.begin < start + count for group in groups)


def test_seeds_epochs_and_pools_have_different_orders() -> None:
    sizes = [[40] * 20, [40] * 20]
    first = order_of(sizes).samples_at(np.arange(400))
    assert not np.array_equal(first[:400], order_of(sizes, seed=8).samples_at(np.arange(400)))
    again = order_of(sizes).samples_at(np.arange(400, 800))
    assert not np.array_equal(first, again)
    mixed = order_of(sizes, weights=[1, 1]).samples_at(np.arange(400))
    assert not np.array_equal(mixed[0::2], mixed[1::2] - 200)


def test_an_order_is_close_to_random_in_a_group_that_has_all_shards() -> None:
    order = order_of([[41] * 400], shuffled=10**6).samples_at(np.arange(4000))
    assert abs(np.corrcoef(np.arange(4000), order)[0, 1]) < 0.06
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.06


def test_the_order_of_a_version_is_that_of_the_next() -> None:
    """A resumed run must read on: whoever changes this order ends every run that began in it."""
    order = order_of([[9, 30, 17], [25, 6]], weights=[0.7, 0.3], shuffled=60)
    assert order.samples_at(np.arange(12)).tolist() == [20, 7, 8, 21, 5, 6, 18, 3, 4, 2, 19, 9]
    plain = order_of([[9, 30, 17], [25, 6]], shuffled=60)
    assert plain.samples_at(np.arange(12)).tolist() == [1, 10, 13, 0, 11, 12, 2, 6, 3, 9, 7, 8]


def _work_of_a_look_up(shards: int) -> tuple[int, int, int]:
    """Calls, the most bytes that were allocated, and words that were scrambled, in a look-up of ten
    positions near 10^8."""
    order = TokenOrder([SourceShards([70_000] * shards, [140_000] * shards)], [1.0], 64, 7, 10**9)
    positions = np.arange(10**8, 10**8 + 10)
    expected = order.samples_at(positions)  # makes the tables of the epoch
    calls, words, feistel = 0, 0, sample_order._feistel

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def counted(values: Any, half_bits: int, keys: Any) -> Any:
        nonlocal words
        words += len(values)
        return feistel(values, half_bits, keys)

    with patch.object(sample_order, "_feistel", counted):
        tracemalloc.start()
        sys.setprofile(count)
        try:
            found = order.samples_at(positions)
        finally:
            sys.setprofile(None)
            _, most_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    assert found.tolist() == expected.tolist()
    return calls, most_bytes, words


def test_a_look_up_costs_the_same_in_a_hundred_times_more_shards() -> None:
    few, many = _work_of_a_look_up(2_000), _work_of_a_look_up(200_000)
    for of_few, of_many in zip(few, many, strict=True):
        assert of_many < 3 * of_few + 10
    assert many[1] < 100_000, "no array of all shards"


def test_positions_of_a_trillion_do_not_overflow() -> None:
    order = order_of([[2000] * 50, [900]], weights=[1e6, 1.0], shuffled=10**6)
    samples = order.samples_at(np.arange(2**40, 2**40 + 1000))
    assert ((samples >= 0) & (samples < order.samples)).all()
    assert len(np.unique(samples)) > 900


@pytest.mark.parametrize("sizes", [[], [[]], [[5], []], [[5, 1]]])
def test_a_source_without_a_sample_is_refused(sizes: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="at least two tokens"):
        order_of(sizes)


def test_weights_of_other_sources_are_refused() -> None:
    with pytest.raises(ValueError, match="1 weights for 2 sources"):
        order_of([[5], [5]], weights=[1.0])
