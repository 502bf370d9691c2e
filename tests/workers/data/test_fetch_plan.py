"""What a node's cache holds: what readers read, within its limit, and nothing twice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.data.token_sets import BYTES

from holdfast_workers.data import fetch_plan
from holdfast_workers.data.corpus import CorpusError
from holdfast_workers.data.fetch_plan import FetchPlan, KeptShards
from holdfast_workers.data.mixture import Mixture
from holdfast_workers.data.token_order import SourceShards, TokenOrder
from holdfast_workers.data.token_set import ShardFacts, TokenSet

TOKENS = st.lists(st.integers(2, 60), min_size=1, max_size=12)
SOURCES = st.lists(TOKENS, min_size=1, max_size=4)
HEADER_BYTES = 40


def sets_of(sources: Sequence[Sequence[int]]) -> list[TokenSet]:
    """Shards with these numbers of tokens; those at equal places of two sources with equal tokens
    are the same."""
    return [
        TokenSet(
            f"source {number}",
            "text",
            BYTES,
            tuple(
                ShardFacts(f"{tokens:016x}{place:016x}", HEADER_BYTES + 2 * tokens, tokens, 1)
                for place, tokens in enumerate(source)
            ),
            1,
            sum(source),
        )
        for number, source in enumerate(sources)
    ]


def order_of(
    sets: Sequence[TokenSet], weights: Sequence[float] | None, seed: int, shuffled: int
) -> TokenOrder:
    sizes = [
        SourceShards([s.tokens for s in each.shards], [s.nbytes for s in each.shards])
        for each in sets
    ]
    return TokenOrder(sizes, weights, 4, seed, shuffled)


def manifest_bytes(sets: Sequence[TokenSet]) -> int:
    return sum({each.digest: len(each.encode()) for each in sets}.values())


def least_limit(error: CorpusError) -> int:
    """In bytes, as the refusal says."""
    least = re.search(r"to at least ([\d.e+-]+)", str(error))
    assert least, error
    return round(float(least[1]) * 1e9)


class Case:
    """A corpus, its order and the plan, whose cache has `room` bytes for shards."""

    def __init__(self, data: st.DataObject) -> None:
        sources = data.draw(SOURCES)
        self.sets = sets_of(sources)
        self.shards = [shard for each in self.sets for shard in each.shards]
        self.window = data.draw(st.integers(1, 40))
        self.weights = None
        if data.draw(st.booleans()):
            count = len(sources)
            weights = st.lists(st.integers(1, 20).map(float), min_size=count, max_size=count)
            self.weights = data.draw(weights)
        self.seed, self.shuffled = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 600))
        self.order = order_of(self.sets, self.weights, self.seed, self.shuffled)
        self.room = data.draw(st.one_of(st.just(0), st.integers(0, 4000)))
        sizes = data.draw(st.lists(st.integers(50, 300), max_size=3))
        self.kept = [ShardFacts(f"kept {n}", size, 20, 1) for n, size in enumerate(sizes)]

    def plan(self, room: int | None = None, shuffled: int | None = None) -> FetchPlan:
        limit = manifest_bytes(self.sets) + (self.room if room is None else room)
        order, of = self.order, self.shuffled
        if shuffled is not None:
            order, of = order_of(self.sets, self.weights, self.seed, shuffled), shuffled
        with patch.object(fetch_plan, "LEAST_HELD_BYTES", 300):
            return FetchPlan(order, self.sets, self.window, of, limit, KeptShards(self.kept))

    def least_plan(self) -> FetchPlan:
        """With as much room as a refusal asks for, if there is one."""
        try:
            return self.plan()
        except CorpusError as error:
            self.room = least_limit(error) - manifest_bytes(self.sets)
            return self.plan()

    def read(self, window: int) -> set[str]:
        """The shards that the samples of a window are from."""
        positions = np.arange(window * self.window, (window + 1) * self.window)
        numbers, _ = self.order.windows_of(self.order.samples_at(positions))
        return {self.shards[number].digest for number in numbers.tolist()}


@given(data=st.data())
def test_what_two_windows_read_is_held_within_the_limit(data: st.DataObject) -> None:
    """A reader has mapped no other shards than those of the groups of its window: so there is
    always room for what it waits for."""
    case = Case(data)
    plan = case.least_plan()
    for window in data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=20)):
        held = plan.held(window)
        digests = {shard.digest for shard in held}
        assert len(digests) == len(held)
        assert sum(shard.nbytes for shard in held) <= case.room
        assert case.read(window) | case.read(window + 1) <= digests
        groups = case.order.groups_between(window * case.window, (window + 2) * case.window)
        assert {case.shards[n].digest for group in groups for n in group.shards} <= digests
        read = plan.read(window)
        assert read == held[: len(read)]
        assert case.read(window) <= {shard.digest for shard in read}
        assert plan.phase(window) == plan.phase(window)
        if plan.phase(window) == plan.phase(window + 1):
            assert (read, held) == (plan.read(window + 1), plan.held(window + 1))
        both = {shard.digest: shard.nbytes for shard in (*read, *plan.read(window + 1))}
        assert sum(both.values()) <= case.room, "two nodes with one cache lock them"
        kept = {shard.digest for shard in case.kept}
        assert kept <= {shard.digest for shard in read}, "an evaluation may come at any step"
        if plan.keeps_all:
            assert digests == {shard.digest for shard in case.shards} | kept


@given(data=st.data())
def test_what_is_held_stays_until_its_group_has_been_read(data: st.DataObject) -> None:
    case = Case(data)
    plan = case.least_plan()
    first = data.draw(st.integers(0, 100))
    held = {shard.digest for shard in plan.held(first)}
    for window in range(first + 1, first + 30):
        start, after = window * case.window, {shard.digest for shard in plan.held(window)}
        gone = held - after
        former = case.order.groups_between(start - case.window, start)
        places = case.order.places_at(start)
        past = [g for g in former if (g.epoch, g.number) < places[g.pool]]
        assert gone <= {case.shards[n].digest for group in past for n in group.shards}
        held = after


@given(data=st.data())
def test_a_refusal_says_what_is_enough(data: st.DataObject) -> None:
    case = Case(data)
    try:
        case.plan()
    except CorpusError as error:
        limit, text = least_limit(error), str(error)
    else:
        assume(False)
    assert limit > manifest_bytes(case.sets) + case.room
    case.plan(room=limit - manifest_bytes(case.sets))
    if most := re.search(r"data\.shuffle_gb to at most ([\d.e+-]+)", text):
        case.plan(shuffled=int(float(most[1]) * 1e9))
    else:
        assert "a smaller data.shuffle_gb alone does not help" in text
        with pytest.raises(CorpusError):
            case.plan(shuffled=1)


def test_the_cache_needs_two_groups() -> None:
    """The rule in the docs."""
    sets = sets_of([[1000] * 200])
    shard = sets[0].shards[0].nbytes
    order = order_of(sets, None, 1, 20 * shard)
    least = manifest_bytes(sets) + 40 * shard + 2 * shard
    assert not FetchPlan(order, sets, 100, 20 * shard, least).keeps_all
    with pytest.raises(CorpusError, match=r"data\.shuffle_gb to at most 3\.\d+e-05"):
        FetchPlan(order, sets, 100, 20 * shard, least - 4 * shard)


@given(
    weights=st.lists(st.integers(1, 50).map(float), min_size=1, max_size=9),
    start=st.integers(0, 10**7),
    count=st.integers(1, 400),
)
def test_a_source_has_no_more_of_a_stretch_than_it_says(
    weights: list[float], start: int, count: int
) -> None:
    mixture = Mixture(weights)
    sources, indices = mixture.choose(np.arange(start, start + count))
    for source in range(len(weights)):
        assert (sources == source).sum() <= mixture.most_of(source, count)
    for place in (0, count // 2, count - 1):
        source, index = int(sources[place]), int(indices[place])
        assert mixture.position(source, index) == start + place
