"""Boxes as views of payloads, and as a stream of bytes of bounded batches.

Sender and receiver of the same boxes make the same batches of them, in the same order, each from
its own payload: so a batch is gathered, hashed and sent while it is in the processor's cache, and
received, hashed and spread out likewise. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast_workers.checkpoint.boxes import Box
from holdfast_workers.state.layout import TensorEntry

Array = NDArray[Any]

BATCH_BYTES = 128 * 1024
"""Stays in a core's own cache with the socket's buffers, see `memory/wire.py`."""


def view_of(payload: memoryview, entry: TensorEntry, box: Box) -> Array:
    """The elements of `box`, a part of the global tensor, where they lie in the payload."""
    item_bytes = entry.nbytes // math.prod(entry.shape)
    # As plain numbers of their size: bare bytes (void) are copied far more slowly.
    dtype = f"u{item_bytes}" if item_bytes in (1, 2, 4, 8) else f"V{item_bytes}"
    whole: Array = np.ndarray(entry.shape, dtype, payload, entry.offset)
    place: tuple[Any, ...] = (..., *box.within(Box(entry.offsets, entry.shape)))  # of a scalar too
    part: Array = whole[place]
    return part


def batches(views: Iterable[Array], limit: int = BATCH_BYTES) -> Iterator[list[Array]]:
    """The views in order, cut and grouped so that no batch is above `limit` bytes."""
    batch: list[Array] = []
    taken = 0
    for view in views:
        for piece in _cut(view, limit):
            if taken + piece.nbytes > limit:
                yield batch
                batch, taken = [], 0
            batch.append(piece)
            taken += piece.nbytes
    if batch:
        yield batch


def gather(batch: Iterable[Array], stage: NDArray[np.uint8]) -> int:
    """Write the pieces one after the other into `stage`; how many bytes they are."""
    at = 0
    for piece in batch:
        _staged(piece, stage, at)[...] = piece
        at += piece.nbytes
    return at


def spread(batch: Iterable[Array], stage: NDArray[np.uint8]) -> None:
    """The way back: fill the pieces from `stage`."""
    at = 0
    for piece in batch:
        piece[...] = _staged(piece, stage, at)
        at += piece.nbytes


def _staged(piece: Array, stage: NDArray[np.uint8], at: int) -> Array:
    return stage[at : at + piece.nbytes].view(piece.dtype).reshape(piece.shape)


def _cut(view: Array, limit: int) -> Iterator[Array]:
    """Parts of at most `limit` bytes that follow each other in the order of the elements."""
    if view.nbytes <= limit:
        yield view
        return
    row = view.nbytes // view.shape[0]
    if row > limit:
        for index in range(view.shape[0]):
            yield from _cut(view[index, ...], limit)
        return
    rows = limit // row
    for start in range(0, view.shape[0], rows):
        yield view[start : start + rows]
