"""Blocks are divided among the stages of a pipeline as evenly as they can be."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.parallelize.stage_split import balanced_ends, split_stages, stages_of
from holdfast_workers.spec import ParallelSpec


def greatest(ends: tuple[int, ...], head: float) -> float:
    sizes = [end - start for start, end in pairwise((0, *ends))]
    return max(*map(float, sizes[:-1]), sizes[-1] + head)


@given(stages=st.integers(2, 5), more=st.integers(0, 6), head=st.floats(0.0, 4.0))
def test_no_division_has_less_work_in_its_greatest_stage(
    stages: int, more: int, head: float
) -> None:
    blocks = stages + more
    ends = balanced_ends(blocks, stages, head)
    assert all(start < end for start, end in pairwise((0, *ends)))
    all_ends = [(*cuts, blocks) for cuts in combinations(range(1, blocks), stages - 1)]
    assert greatest(tuple(ends), head) == min(greatest(each, head) for each in all_ends)


@given(pp=st.integers(2, 4), schedule=st.sampled_from(["1f1b", "interleaved", "zero_bubble"]))
def test_every_block_is_on_one_rank(pp: int, schedule: str) -> None:
    parallel = ParallelSpec.model_validate({"pp": pp, "schedule": schedule})
    count = pp * parallel.stages_on_a_rank
    parts = split_stages(count, 2 * count + 1, 0.5)
    dealt = [index for at in range(pp) for index in stages_of(parallel, pp, at)]
    assert sorted(dealt) == list(range(count))
    blocks = [name for part in parts for name in part.block_names]
    assert blocks == [str(block) for block in range(2 * count + 1)]
    assert (parts[0].is_first, parts[-1].is_last) == (True, True)


def test_fewer_blocks_than_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="3 blocks cannot be divided among 4 stages"):
        balanced_ends(3, 4, 0.0)
