"""Look-ups in the order of samples, far inside a large mixture, as a step asks for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np

from holdfast_workers.data.token_order import SourceShards, TokenOrder
from holdfast_workers.token_sets.plan import SHARD_BYTES

POSITION = 100_000_000
WEIGHTS = (0.6, 0.3, 0.1)
_SHUFFLE_BYTES = 10_000_000_000
_TOKEN_BYTES = 2


@dataclass(frozen=True)
class LookupFigures:
    median_ms: float
    greatest_ms: float
    first_ms: float
    """With the tables of the epochs, which are made once in an epoch."""
    samples: int
    """Of an epoch of all sources."""


def measure(
    shards: int, batch: int, sequence_length: int, lookups: int, seed: int
) -> LookupFigures:
    """`shards`: of each source, from a tenth of the largest size up to it."""
    rng = np.random.default_rng(seed)
    sources = []
    for _ in WEIGHTS:
        nbytes = rng.integers(SHARD_BYTES // 10, SHARD_BYTES, shards)
        sources.append(SourceShards((nbytes // _TOKEN_BYTES).tolist(), nbytes.tolist()))
    order = TokenOrder(sources, WEIGHTS, sequence_length, seed, _SHUFFLE_BYTES)

    def times_ms() -> Iterator[float]:
        for number in range(1 + lookups):
            first = POSITION + number * batch
            positions = np.arange(first, first + batch, dtype=np.int64)
            began = time.perf_counter()
            order.samples_at(positions)
            yield 1e3 * (time.perf_counter() - began)

    first, *others = times_ms()
    return LookupFigures(
        round(median(others), 4), round(max(others), 3), round(first, 1), order.samples
    )
