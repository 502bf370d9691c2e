"""Boxes as views of payloads, and as a stream of bytes in bounded batches.

Sender and receiver of the same boxes form the same batches in the same order, each from its own
payload. A batch is gathered, hashed and sent while it is in the processor's cache, and received,
hashed and scattered likewise. No torch.
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
"""Fits into a core's own cache together with the socket's buffers, see `memory/wire.py`."""


def view_of(payload: memoryview, entry: TensorEntry, box: Box) -> Array:
    """A view of the payload's elements that belong to `box`, a part of the global tensor."""
    item_bytes = entry.nbytes // math.prod(entry.shape)
    # Integers of the element's size: raw bytes (void) are copied far more slowly.
    dtype = f"u{item_bytes}" if item_bytes in (1, 2, 4, 8) else f"V{item_bytes}"
    whole: Array = np.ndarray(entry.shape, dtype, payload, entry.offset)
    place: tuple[Any, ...] = (
        ...,
        *box.within(Box(entry.offsets, entry.shape)),
    )  # or a scalar
    part: Array = whole[place]
    return part


def batches(views: Iterable[Array], limit: int = BATCH_BYTES) -> Iterator[list[Array]]:
    """The views in order, cut and grouped so that no batch exceeds `limit` bytes."""
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
    """Write the pieces one after the other into `stage`; return their size in bytes."""
    offset = 0
    for piece in batch:
        _staged(piece, stage, offset)[...] = piece
        offset += piece.nbytes
    return offset


def scatter(batch: Iterable[Array], stage: NDArray[np.uint8]) -> None:
    """Fill the pieces from `stage`: the inverse of `gather`."""
    offset = 0
    for piece in batch:
        piece[...] = _staged(piece, stage, offset)
        offset += piece.nbytes


def _staged(piece: Array, stage: NDArray[np.uint8], offset: int) -> Array:
    return stage[offset : offset + piece.nbytes].view(piece.dtype).reshape(piece.shape)


def _cut(view: Array, limit: int) -> Iterator[Array]:
    """Consecutive parts of at most `limit` bytes, in the order of the elements."""
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
