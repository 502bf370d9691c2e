"""What a job has read of its sources follows from its step, as the order of samples says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.views.sources import data_read
from holdfast_workers.data.token_order import SourceShards, TokenOrder
from holdfast_workers.spec import (
    DataSpec,
    ModelSpec,
    PreparedSpec,
    SourceSpec,
    TrainingSpec,
    TrainSpec,
)
from holdfast_workers.training.skipped_windows import Ledger

SIZES = st.lists(st.lists(st.integers(2, 40), min_size=1, max_size=6), min_size=1, max_size=4)
SKIPPED = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), max_size=3)
LENGTH, BATCH = 4, 6


def order_of(sizes: Sequence[Sequence[int]], weights: Sequence[float] | None) -> TokenOrder:
    sources = [SourceShards(each, [2 * tokens for tokens in each]) for each in sizes]
    return TokenOrder(sources, weights, LENGTH, seed=7, shuffle_bytes=100)


def stored(
    sizes: Sequence[Sequence[int]], weights: Sequence[float] | None, length: int = LENGTH
) -> dict[str, Any]:
    sources = tuple(
        SourceSpec(path=f"/data/{at}", weight=weights[at] if weights else None)
        for at in range(len(sizes))
    )
    sets = tuple(
        PreparedSpec(
            uri="/sets/a",
            origin="",
            digest="0" * 32,
            vocabulary=256,
            tokens=sum(each),
            sequence_length=length,
            samples=sum(-(-(tokens - 1) // LENGTH) for tokens in each),
        )
        for each in sizes
    )
    spec = TrainingSpec(
        model=ModelSpec(sequence_length=LENGTH),
        data=DataSpec(sources=sources, prepared=sets),
        train=TrainSpec(global_batch=BATCH),
    )
    return spec.model_dump(mode="json")


@given(sizes=SIZES, drawn=st.data(), step=st.integers(0, 60), skipped=SKIPPED)
def test_samples_of_each_source_are_those_that_the_steps_have_read(
    sizes: list[list[int]], drawn: st.DataObject, step: int, skipped: list[tuple[int, int]]
) -> None:
    weights = drawn.draw(
        st.none() | st.lists(st.floats(0.01, 9), min_size=len(sizes), max_size=len(sizes))
    )
    ledger = Ledger.of((start, start + count) for start, count in skipped)
    order = order_of(sizes, weights)
    windows = np.array([ledger.window(each) for each in range(1, step + 1)], dtype=np.int64)
    positions = (windows[:, None] * BATCH + np.arange(BATCH)).reshape(-1)
    read = np.bincount(order.source_of(order.samples_at(positions)), minlength=len(sizes))
    found = data_read(stored(sizes, weights), step, ledger.ranges)
    assert found is not None
    epochs = [source.epochs for source in found.sources]
    if weights is None:
        assert epochs == [read.sum() / order.samples] * len(sizes)
    else:
        own = [order_of([each], None).samples for each in sizes]
        assert epochs == [count / size for count, size in zip(read, own, strict=True)]
    for source, epoch in zip(found.sources, epochs, strict=True):
        assert epoch is not None and source.tokens is not None
        assert source.tokens_seen == round(epoch * source.tokens)
    if not skipped:
        assert epochs == pytest.approx(order.epochs_before(step * BATCH))


def test_before_the_preparation_only_the_sources_are_known() -> None:
    spec = stored([[9, 9], [30]], [1.0, 3.0])
    spec["data"]["prepared"] = []
    found = data_read(spec, 0)
    assert found is not None
    assert found.tokenizer == "bytes"
    assert [(each.path, each.weight) for each in found.sources] == [("/data/0", 1), ("/data/1", 3)]
    assert {(each.tokens, each.tokens_seen, each.epochs) for each in found.sources} == {
        (None, None, None)
    }
    assert data_read({"data": {}}, 5) is None
    assert data_read({"data": {**spec["data"], "of_another_version": 1}}, 5) is None


def test_samples_of_other_sequences_are_estimated_from_the_tokens() -> None:
    found = data_read(stored([[40] * 3], None, length=8), 10)
    assert found is not None
    assert found.sources[0].epochs == 2  # 60 samples of 4 targets; the set has 120 tokens
