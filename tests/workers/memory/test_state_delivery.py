"""Deliveries of a rank's state, and the fence that ends them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.memory.shm import MESH, SECRET, layout_of, write
from tests.support.waiting import DEADLINE_S

from holdfast_workers.errors import StaleCommand
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.memory.state_delivery import StateDelivery, parts_for
from holdfast_workers.protocol.messages import Origin, Place, Restore, Tier

NBYTES = 1 << 14
OTHER_MESH = "dp_shard=1,tp=1"


def test_a_delivery_fenced_before_its_start_leaves_the_segment_unchanged(shm: Path) -> None:
    """All of its sources are on this node: there is no connection that a fence could shut down."""
    store = SegmentStore(shm, MESH)
    there = write(store.for_mesh(OTHER_MESH).ensure(0, Place.OWN, layout_of(NBYTES)), 1, 7)
    own = store.ensure(0, Place.OWN, layout_of(NBYTES))
    before = [write(own, 1, 3), write(own, 1, 4)]
    origin = Origin(0, "n0", Place.OWN, "127.0.0.1", 1, there.digest)
    source = Restore(Tier.RESHARD, 7, attempt=1, mesh=OTHER_MESH, origins=(origin,))
    delivery = StateDelivery("n0", SECRET, timeout_s=DEADLINE_S)
    delivery.fence(3)
    with pytest.raises(StaleCommand):
        delivery.deliver(2, 0, source, store, {})
    assert own.commits() == before[::-1]
    delivery.deliver(3, 0, source, store, {})
    assert own.find(1, 7) is not None


@given(before=st.integers(1, 6), now=st.integers(1, 6), nodes=st.integers(1, 4))
def test_every_part_of_another_world_comes_to_some_rank_and_every_rank_has_one(
    before: int, now: int, nodes: int
) -> None:
    held_by = {old: f"n{old % nodes}" for old in range(before)}
    origins = tuple(
        Origin(old, agent, Place.OWN, "127.0.0.1", 1, "d") for old, agent in held_by.items()
    )
    source = Restore(Tier.RESHARD, 7, attempt=1, mesh=OTHER_MESH, origins=origins)
    at_hand: dict[str, set[int]] = {f"n{node}": set() for node in range(nodes)}
    for old, agent in held_by.items():
        at_hand[agent].add(old)
    for rank in range(now):
        agent = f"n{rank % nodes}"
        brought = parts_for(rank, now, source, agent)
        assert all(part.agent == held_by[old] != agent for old, part in brought.items())
        at_hand[agent] |= brought.keys()
    used = {f"n{rank % nodes}" for rank in range(now)}
    assert set().union(*(at_hand[agent] for agent in used)) == set(range(before))
    assert all(at_hand[agent] for agent in used)
