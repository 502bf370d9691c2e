"""Every sample of an epoch once, in an order independent of the number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_workers.data.sample_order import (
    ConsecutiveSamples,
    Indices,
    micro_batch_positions,
    passes,
    permute,
    samples_at,
    samples_digest,
)

SEEDS = st.integers(min_value=0, max_value=2**63)


@given(samples=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 1000))
def test_an_epoch_is_a_permutation(samples: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(samples), samples, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(samples))


def test_a_million_and_three_samples_are_a_permutation() -> None:
    samples = 1_000_003
    order = permute(np.arange(samples), samples, 7, 0)
    assert np.array_equal(np.bincount(order), np.ones(samples))


def test_positions_of_ten_billion_samples_can_be_computed() -> None:
    samples = 10**10
    positions = np.array([0, 1, samples - 1], dtype=np.int64)
    order = permute(positions, samples, 7, 0)
    assert len(set(order.tolist())) == 3
    assert ((order >= 0) & (order < samples)).all()


@given(samples=st.integers(100, 3000), seed=SEEDS)
def test_epochs_and_seeds_have_different_orders(samples: int, seed: int) -> None:
    positions = np.arange(samples)
    first = permute(positions, samples, seed, 0)
    assert not np.array_equal(first, permute(positions, samples, seed, 1))
    assert not np.array_equal(first, permute(positions, samples, seed + 1, 0))


@given(st.lists(st.tuples(st.integers(0, 30_000), st.integers(0, 5000)), max_size=4), SEEDS)
def test_samples_at_consecutive_positions_are_those_of_each(
    ranges: list[tuple[int, int]], seed: int
) -> None:
    consecutive = ConsecutiveSamples(lambda positions: samples_at(positions, 1009, seed))
    for first, count in ranges:
        positions = np.arange(first, first + count)
        found = consecutive.samples_at(positions)
        assert np.array_equal(found, samples_at(positions, 1009, seed))


def test_a_few_samples_after_another_are_looked_up_at_once() -> None:
    asked: list[int] = []

    def looked_up(positions: Indices) -> Indices:
        asked.append(len(positions))
        return positions

    consecutive = ConsecutiveSamples(looked_up)
    for first in range(0, 2048, 16):
        consecutive.samples_at(np.arange(first, first + 16))
    assert len(asked) == 1


def test_an_order_is_close_to_random() -> None:
    samples = 4096
    order = permute(np.arange(samples), samples, 3, 0)
    correlation = np.corrcoef(np.arange(samples), order)[0, 1]
    neighbours = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 0.06
    assert abs(neighbours) < 0.06


@given(
    window=st.integers(0, 5),
    micro_batch=st.integers(1, 4),
    micro_batches=st.integers(1, 24),
    data_parallel=st.integers(1, 24),
)
def test_the_ranks_read_a_window_exactly_once_also_if_it_is_not_dealt_evenly(
    window: int, micro_batch: int, micro_batches: int, data_parallel: int
) -> None:
    global_batch = micro_batch * micro_batches
    read = [
        micro_batch_positions(
            window,
            index,
            data_index=rank,
            data_parallel=data_parallel,
            micro_batch=micro_batch,
            global_batch=global_batch,
        )
        for index in range(passes(global_batch, micro_batch, data_parallel))
        for rank in range(data_parallel)
    ]
    start = window * global_batch
    assert sorted(np.concatenate(read).tolist()) == list(range(start, start + global_batch))


@given(samples=st.integers(1, 50), start=st.integers(0, 200), count=st.integers(1, 120))
def test_a_window_may_span_epochs(samples: int, start: int, count: int) -> None:
    positions = np.arange(start, start + count)
    expected = [
        int(permute(np.array([p % samples]), samples, 5, int(p) // samples)[0]) for p in positions
    ]
    assert samples_at(positions, samples, 5).tolist() == expected


@settings(max_examples=50)
@given(
    window=st.integers(0, 1000),
    micro_batch=st.integers(1, 4),
    data_parallel=st.sampled_from([1, 2, 3, 4, 6]),
    rounds=st.integers(1, 3),
)
def test_a_step_consumes_its_window_once_on_any_world(
    window: int, micro_batch: int, data_parallel: int, rounds: int
) -> None:
    global_batch = micro_batch * data_parallel * rounds
    positions = np.concatenate(
        [
            micro_batch_positions(
                window,
                index,
                data_index=rank,
                data_parallel=data_parallel,
                micro_batch=micro_batch,
                global_batch=global_batch,
            )
            for rank in range(data_parallel)
            for index in range(rounds)
        ]
    )
    first = window * global_batch
    assert sorted(positions.tolist()) == list(range(first, first + global_batch))


@given(cut=st.integers(0, 32), seed=SEEDS)
def test_digests_of_parts_add_up_to_the_digest_of_the_whole(cut: int, seed: int) -> None:
    positions = np.arange(32)
    samples = samples_at(positions, 1000, seed)
    parts = samples_digest(positions[:cut], samples[:cut]) + samples_digest(
        positions[cut:], samples[cut:]
    )
    assert parts % 2**64 == samples_digest(positions, samples)


def test_the_digest_changes_with_one_sample() -> None:
    positions = np.arange(8)
    samples = samples_at(positions, 1000, 1)
    other = samples.copy()
    other[3] += 1
    assert samples_digest(positions, samples) != samples_digest(positions, other)


def test_no_samples_have_no_order() -> None:
    with pytest.raises(ValueError, match="no samples"):
        permute(np.arange(1), 0, 1, 0)
