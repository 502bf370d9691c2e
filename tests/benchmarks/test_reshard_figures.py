"""Figures of the restore and reshard benchmarks, and correctness of the measured layouts."""

from __future__ import annotations

import math

import pytest
from benchmarks.mesh_layouts import RANDOM, layout_of

from benchmarks import reshard, restore
from holdfast_workers.checkpoint.boxes import Box, tiling_fault
from holdfast_workers.checkpoint.moves import box_of


def test_each_fetch_is_compared_with_the_raw_stream_of_its_round() -> None:
    found = restore.summary([0.2, 0.4, 0.1], [0.1, 0.3, 0.1], 100_000_000)
    assert found.round_ratios == [0.5, 0.75, 1.0]
    assert (found.ratio, found.fetch_mb_per_s, found.raw_mb_per_s) == (0.75, 500, 1000)


def test_a_reshard_is_compared_with_the_sum_of_save_and_load() -> None:
    pairs = reshard.sample(3)
    found = reshard.summary(
        pairs, [0.1, 0.2, 0.3], [(0.5, 0.5), (0.5, 0.5), (1.0, 2.0)], [(11, 10), (0, 0), (5, 5)]
    )
    assert (found.ratio, found.worst_ratio) == (0.1, 0.2)
    assert found.moved_vs_least == 1.1
    assert [pair.old for pair in found.pairs] == [old for old, _ in pairs]


@pytest.mark.parametrize("pair", reshard.sample(10), ids=str)
def test_the_measured_state_is_completely_sharded_on_every_measured_mesh(
    pair: reshard.Pair,
) -> None:
    parameters = reshard.model(8)
    for mesh in pair:
        size = math.prod(mesh.values())
        assert 1 < size <= reshard.MOST_RANKS
        boxes: dict[str, set[Box]] = {}
        for rank in range(size):
            for entry in layout_of(parameters, mesh, rank).tensors:
                boxes.setdefault(entry.name, set()).add(box_of(entry))
        for parameter in parameters:
            assert tiling_fault(boxes[parameter.name], parameter.shape) is None
        assert RANDOM in boxes
    assert pair[0] != pair[1]


def test_the_moved_bytes_are_close_to_the_minimum() -> None:
    for old, new in reshard.sample(6):
        total, least = reshard.moved(reshard.model(8), old, new)
        assert total <= 1.1 * least
