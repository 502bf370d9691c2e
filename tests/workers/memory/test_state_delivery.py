"""Deliveries of a rank's state, and the fence that ends them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.memory.shm import MESH, SECRET, layout_of, write

from holdfast_workers.errors import StaleCommand
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.memory.state_delivery import StateDelivery
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
    delivery = StateDelivery("n0", SECRET, timeout_s=10.0)
    delivery.fence(3)
    with pytest.raises(StaleCommand):
        delivery.deliver(2, 0, source, store, {})
    assert own.commits() == before[::-1]
    delivery.deliver(3, 0, source, store, {})
    assert own.find(1, 7) is not None
