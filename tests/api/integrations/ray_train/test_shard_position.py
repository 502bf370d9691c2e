"""Positions in shards of datasets: each row of an epoch is taken once, whatever is interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.integrations.ray_train.errors import StorageUnusable
from holdfast.integrations.ray_train.shard_position import (
    FILE_NAME,
    EpochCounter,
    ShardPosition,
    encode,
    read,
    start_of,
)

POSITIONS = st.builds(ShardPosition, st.integers(0, 5), st.integers(0, 100), st.integers(0, 9))


@given(
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8)), max_size=5),
)
def test_each_row_of_each_epoch_is_taken_once_over_any_restarts(
    rows: int, batch: int, epochs: int, crashes: list[tuple[int, int]]
) -> None:
    """`crashes`: after how many batches, and how many batches were taken since the report."""
    saved, saved_seen = ShardPosition(), list[tuple[int, int]]()
    for after, lost in [*crashes, (10**6, 0)]:
        counter, seen, taken = EpochCounter(saved), list(saved_seen), 0
        reports = [(saved, saved_seen)]
        while counter.position.epoch < epochs and taken < after:
            start = counter.begin()
            epoch_rows = range(rows)[start.rows :]
            for first in range(0, len(epoch_rows), batch):
                if taken == after:
                    break
                counter.take(start.epoch, batch)
                seen += [(start.epoch, row) for row in epoch_rows[first : first + batch]]
                taken += 1
                reports.append((counter.position, list(seen)))
            else:
                counter.end(start.epoch)
        saved, saved_seen = reports[max(0, len(reports) - 1 - lost)]
    assert sorted(saved_seen) == [(epoch, row) for epoch in range(epochs) for row in range(rows)]


@given(st.lists(POSITIONS, max_size=4), st.integers(1, 4))
def test_all_ranks_begin_in_one_epoch_and_no_row_twice_unless_their_number_changed(
    stored: list[ShardPosition], ranks: int
) -> None:
    start = start_of(stored, ranks)
    assert len(start.positions) == ranks
    assert {each.epoch for each in start.positions} == {start.epoch}
    assert start.epoch == max((each.epoch for each in stored), default=0)
    if len(stored) == ranks:
        assert start.repeated == 0
        for before, now in zip(stored, start.positions, strict=True):
            assert now == (before if before.epoch == start.epoch else ShardPosition(start.epoch))
    else:
        assert {each.rows for each in start.positions} == {0}
        here = [each.rows for each in stored if each.epoch == start.epoch]
        assert start.repeated == sum(here)


def test_an_iteration_that_is_left_ends_its_epoch_and_no_later_one() -> None:
    counter = EpochCounter(ShardPosition(2, 5))
    first = counter.begin()
    assert first == ShardPosition(2, 5)
    counter.take(first.epoch, 3)
    assert counter.position == ShardPosition(2, 8)
    second = counter.begin()
    assert second == ShardPosition(3, 0)
    counter.take(first.epoch, 3)
    counter.end(first.epoch)  # the first iterator is closed late
    counter.take(second.epoch, 4)
    assert counter.position == ShardPosition(3, 4)
    counter.end(second.epoch)
    assert counter.position == ShardPosition(4, 0)


@given(st.lists(st.integers(1, 9), min_size=1), st.lists(st.integers(1, 9)), st.data())
def test_other_blocks_than_before_the_checkpoint_are_seen(
    before: list[int], now: list[int], data: st.DataObject
) -> None:
    rows = data.draw(st.integers(1, sum(before)))
    first = EpochCounter(ShardPosition(2))
    first.begin()
    for size in before:
        first.see_block(2, size)
    first.take(2, rows)
    second = EpochCounter(first.position)
    assert second.is_divided_as_before, "nothing is known yet"
    second.begin()
    for size in now:
        second.see_block(2, size)
    assert second.is_divided_as_before == (_leading(before, rows) == _leading(now, rows))
    second.end(2)
    assert second.is_divided_as_before, "later epochs are whole"


def _leading(sizes: list[int], rows: int) -> list[int]:
    return [size for at, size in enumerate(sizes) if sum(sizes[: at + 1]) <= rows]


@given(st.lists(st.fixed_dictionaries({"train": POSITIONS, "eval": POSITIONS}), min_size=1))
def test_positions_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, by_rank: list[dict[str, ShardPosition]]
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    assert read(folder) == {}
    (folder / FILE_NAME).write_text(encode(by_rank))
    assert read(folder) == {
        name: tuple(each[name] for each in by_rank) for name in ("train", "eval")
    }


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"shards": {"a": [1]}}', '{"shards": []}'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(StorageUnusable, match=FILE_NAME):
        read(tmp_path)
