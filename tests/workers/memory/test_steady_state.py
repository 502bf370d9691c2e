"""Saves allocate their memory once: later saves use no additional memory or threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.support.memory.shm import MESH, SECRET, layout_of

from holdfast_workers.memory.background_copy import BackgroundCopies
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.replicate import Replicator
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.protocol.messages import Partner, Place
from holdfast_workers.state.digest import ShardDigest
from holdfast_workers.state.rank_state import Snapshot

NBYTES = 8 << 20
WARM_UP = 50
SAVES = 500
GROWTH_LIMIT = 2 << 20  # a quarter of one payload


@pytest.mark.slow
def test_five_hundred_saves_with_a_partner_leak_no_memory_and_no_threads(
    shm: Path,
) -> None:
    arrived = threading.Semaphore(0)
    partner = SegmentStore(shm / "partner", MESH)
    server = DataServer(partner, SECRET, "127.0.0.1")
    own = SegmentStore(shm / "own", MESH)
    replicator = Replicator(own, SECRET, lambda *_: arrived.release(), lambda *_: None)
    replicator.set_partners(0, (Partner("partner", "127.0.0.1", server.port),))
    layout = layout_of(NBYTES)
    segment = own.ensure(0, Place.OWN, layout)
    state = np.zeros(NBYTES, dtype=np.uint8)
    snapshot = Snapshot(layout, [state])
    copies = BackgroundCopies()

    def save(step: int) -> None:
        def copy(captured: Callable[[ShardDigest], None]) -> None:
            digest = snapshot.copy_to(segment.begin(step))
            segment.commit(attempt=1, step=step, digest=digest.whole)
            captured(digest)
            replicator.offer(0, 1, step)

        state[: 1 << 12] = step % 251
        copies.start(copy)
        copies.await_captured()
        assert arrived.acquire(timeout=60)

    process = psutil.Process()
    for step in range(1, WARM_UP + 1):
        save(step)
    gc.collect()
    resident, threads = process.memory_info().rss, threading.active_count()
    for step in range(WARM_UP + 1, WARM_UP + SAVES + 1):
        save(step)
    gc.collect()
    grown = process.memory_info().rss - resident
    copies.finish()
    replicator.close()
    server.close()

    assert [held.step for held in partner.held()] == [WARM_UP + SAVES, WARM_UP + SAVES - 1]
    assert grown < GROWTH_LIMIT, f"{SAVES} saves of {NBYTES} bytes took {grown} bytes more"
    assert threading.active_count() <= threads
