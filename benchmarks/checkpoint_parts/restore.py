"""The speed of restoring a rank's state from a partner's memory, against a raw loopback stream.

A node agent's data server in another process holds the state. This process fetches the state into
its own segment as an agent does for its rank: authenticated, hashed on arrival, committed.
Alternating with that, it sends as many bytes from memory to memory through a plain connection,
without checks or storage. Both write to warm memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch.distributed as dist
from tests.support.memory.data_nodes import source_at
from tests.support.memory.shm import MESH, SECRET, layout_of, write
from tests.support.programs.tier_worlds import TierWorlds

from benchmarks.checkpoint_parts.floor import loopback, stream
from benchmarks.conditions import report
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.fetch import fetch
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.protocol.messages import Place

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RestoreFigures:
    """Medians, and the speed of each fetch relative to the raw stream just before it."""

    ratio: float
    round_ratios: list[float]
    fetch_mb_per_s: float
    raw_mb_per_s: float


def measure(state_mb: int, rounds: int, memory: Path) -> RestoreFigures:
    nbytes = state_mb << 20
    # The first round allocates the memory and warms it.
    times = TierWorlds(memory).run(_fetch_and_stream, 2, nbytes, rounds + 1, memory)[0][1:]
    ratios = [raw_s / fetch_s for fetch_s, raw_s in times]
    fetch_s, raw_s = (median(column) for column in zip(*times, strict=True))
    found = RestoreFigures(
        ratio=round(median(ratios), 4),
        round_ratios=[round(ratio, 3) for ratio in ratios],
        fetch_mb_per_s=round(nbytes / fetch_s / 1e6, 1),
        raw_mb_per_s=round(nbytes / raw_s / 1e6, 1),
    )
    report(
        f"fetch {found.fetch_mb_per_s:.0f} MB/s, raw {found.raw_mb_per_s:.0f} MB/s, "
        f"ratio {found.ratio:.3f}"
    )
    return found


def _fetch_and_stream(rank: int, nbytes: int, rounds: int, root: Path) -> list[tuple[float, float]]:
    """Rank 0: seconds of each fetch from rank 1, and of a raw stream. Rank 1 serves meanwhile."""
    store = SegmentStore(root / f"of-{rank}", MESH)
    held: list[Any] = [0, []]
    if rank == 1:
        segment = store.ensure(0, Place.REPLICA, layout_of(nbytes))
        digests = [write(segment, 1, step).digest for step in (1, 2)]
        server = DataServer(store, SECRET, "127.0.0.1")
        held = [server.port, digests]
    dist.broadcast_object_list(held, src=1)
    port, digests = held
    found = []
    if rank == 0:
        source, target = (np.full(nbytes, value, dtype=np.uint8) for value in (1, 0))
        pair = loopback()
        for number in range(rounds):
            began = perf_counter()
            stream(pair, source.data, target.data)
            raw_s = perf_counter() - began
            step = 1 + number % 2
            found.append((_fetch(store, port, step, digests[step - 1]), raw_s))
    dist.barrier()
    return found


def _fetch(store: SegmentStore, port: int, step: int, digest: str) -> float:
    began = perf_counter()
    fetch(SECRET, source_at(port, step, Place.REPLICA, digest), 0, store, TIMEOUT_S)
    took = perf_counter() - began
    segment = store.find(0, Place.OWN)
    assert segment is not None
    for stored in segment.commits():  # a commit already present would not be fetched again
        segment.quarantine(stored)
    return took
