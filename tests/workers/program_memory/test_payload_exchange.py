"""The plan of an exchange between ranks brings every rank what it lacks, exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.program_memory.folder_parts import BATCH_BYTES, batches_of
from holdfast_workers.program_memory.payload_exchange import (
    PayloadRange,
    StateMissing,
    Transfer,
    plan_transfers,
)

RANKS = 4
RANGES = st.builds(
    PayloadRange, st.integers(0, RANKS - 1), st.integers(0, 3).map(lambda n: 64 * n), st.just(64)
)
WANTED = st.lists(st.lists(RANGES), min_size=RANKS, max_size=RANKS)
AT_HAND = st.lists(st.sets(st.integers(0, RANKS - 1)), min_size=RANKS, max_size=RANKS)


@given(wanted=WANTED, at_hand=AT_HAND)
def test_every_rank_receives_exactly_what_it_lacks(
    wanted: list[list[PayloadRange]], at_hand: list[set[int]]
) -> None:
    known = set().union(*at_hand)
    if any(each.owner not in known for ranges in wanted for each in ranges):
        with pytest.raises(StateMissing):
            plan_transfers(wanted, at_hand)
        return
    transfers = plan_transfers(wanted, at_hand)
    for rank, ranges in enumerate(wanted):
        received = [each.range for each in transfers if each.target == rank]
        lacking = {each for each in ranges if each.owner not in at_hand[rank]}
        assert sorted(received) == sorted(lacking)
    assert all(each.range.owner in at_hand[each.source] for each in transfers)
    assert all(each.source != each.target for each in transfers)


@given(wanted=WANTED)
def test_the_order_in_which_ranges_are_wanted_does_not_matter(
    wanted: list[list[PayloadRange]],
) -> None:
    everywhere = [list(range(RANKS))] * 1 + [[]] * (RANKS - 1)
    reverse = [list(reversed(ranges)) for ranges in wanted]
    assert plan_transfers(wanted, everywhere) == plan_transfers(reverse, everywhere)


def test_several_sources_share_the_work() -> None:
    ranges = [PayloadRange(0, 64 * n, 64) for n in range(6)]
    transfers = plan_transfers([[], [], ranges], [[0], [0], []])
    assert [each.source for each in transfers] == [0, 1] * 3


@given(sizes=st.lists(st.integers(1, BATCH_BYTES), max_size=12))
def test_batches_keep_the_order_and_their_size(sizes: list[int]) -> None:
    transfers = [Transfer(0, 1, PayloadRange(0, at, size)) for at, size in enumerate(sizes)]
    batches = list(batches_of(transfers))
    assert [each for batch in batches for each in batch] == transfers
    assert all(sum(each.range.nbytes for each in batch[:-1]) < BATCH_BYTES for batch in batches)
