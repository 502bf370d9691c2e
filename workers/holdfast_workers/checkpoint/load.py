"""Filling a rank's payload from a checkpoint that any mesh wrote. No torch, no pickle.

Each file that holds something wanted is streamed once, from its beginning to its end: what is
wanted goes straight to its place in the payload, everything goes through the sha256. So the very
bytes that were taken are those that were verified, each is moved once, and memory is bounded; the
price is that the payload is of use only after all files have turned out right, which is when
`load_state` returns. What is read is bare bytes at the places that the manifest names, by the
intersections of boxes; a rank of the same mesh finds its own boxes whole, another gathers its
parts from several files.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from holdfast_workers.checkpoint.boxes import Box
from holdfast_workers.checkpoint.manifest import (
    MANIFEST,
    BadCheckpoint,
    IncompatibleCheckpoint,
    Manifest,
    SavedTensor,
    VerifiedReader,
    complete_manifest,
)
from holdfast_workers.checkpoint.storage import Storage, joined
from holdfast_workers.state.layout import StateLayout, TensorEntry

Bytes = npt.NDArray[np.void]

_SLAB_BYTES = 16 * 1024 * 1024


def load_state(
    at: Storage, layout: StateLayout, payload: memoryview, *, mesh: dict[str, int], rank: int
) -> list[str]:
    """Fill `payload`, laid out by `layout`, and return the names that were left as they were.

    Left are entries that the checkpoint does not have, and per-rank entries unless `mesh` is the
    checkpoint's own. Raises BadCheckpoint if the checkpoint is not complete or a file is not as
    it was saved (the payload is then of no use), IncompatibleCheckpoint if a shape or dtype
    differs, StorageError if it cannot be read.
    """
    manifest = _readable(at)
    parts: dict[str, list[SavedTensor]] = defaultdict(list)
    for tensor in manifest.tensors:
        if not tensor.per_rank or (tensor.rank == rank and manifest.mesh == mesh):
            parts[tensor.name].append(tensor)
    missing = []
    wanted: dict[str, list[_Transfer]] = defaultdict(list)
    for entry in layout.tensors:
        if entry.name not in parts:
            missing.append(entry.name)
            continue
        for transfer in _transfers(entry, payload, parts[entry.name], manifest):
            wanted[transfer.source.file].append(transfer)
    for file in manifest.files:
        if file.name in wanted:
            with VerifiedReader(at, file) as stream:
                for transfer in sorted(wanted[file.name], key=lambda one: one.source.data_offset):
                    transfer.carry_out(stream)
    return missing


def load_whole_state(
    at: Storage, layout: StateLayout, payload: memoryview, *, mesh: dict[str, int], rank: int
) -> None:
    """As `load_state`, and nothing but what belongs to a rank alone may be left as it was: that
    the checkpoint lacks a tensor of the model is IncompatibleCheckpoint too."""
    absent = set(load_state(at, layout, payload, mesh=mesh, rank=rank))
    missing = [one.name for one in layout.tensors if one.name in absent and not one.per_rank]
    if missing:
        raise IncompatibleCheckpoint(f"{at.uri} has no {', '.join(missing)}")


class _Transfer:
    """What one saved box gives to one entry of the payload."""

    def __init__(self, source: SavedTensor, target: Bytes, wanted: Box, common: Box) -> None:
        self.source = source
        self._target = target
        self._wanted = wanted
        self._common = common
        self._item_bytes = target.dtype.itemsize

    def carry_out(self, stream: VerifiedReader) -> None:
        stream.skip_to(self.source.data_offset)
        if self.source.box == self._wanted:
            stream.readinto(self._target.reshape(-1).view(np.uint8).data)
            return
        for slab in self._slabs():
            raw = memoryview(bytearray(slab.volume * self._item_bytes))
            stream.readinto(raw)
            common = slab.intersect(self._common)
            if common is not None:
                found: Bytes = np.ndarray(slab.shape, self._target.dtype, raw)
                self._target[common.within(self._wanted)] = found[common.within(slab)]

    def _slabs(self) -> list[Box]:
        """The saved box, cut along its first dimension into what is held in memory at a time."""
        box = self.source.box
        if not box.shape:
            return [box]
        row_bytes = math.prod(box.shape[1:]) * self._item_bytes
        rows = max(1, _SLAB_BYTES // row_bytes)
        return [
            replace(
                box,
                offsets=(box.offsets[0] + start, *box.offsets[1:]),
                shape=(min(rows, box.shape[0] - start), *box.shape[1:]),
            )
            for start in range(0, box.shape[0], rows)
        ]


def _readable(at: Storage) -> Manifest:
    manifest = complete_manifest(at)
    if manifest.byteorder != sys.byteorder:
        raise IncompatibleCheckpoint(f"{at.uri} was written on a {manifest.byteorder}-endian host")
    return manifest


def _transfers(
    entry: TensorEntry, payload: memoryview, parts: list[SavedTensor], manifest: Manifest
) -> list[_Transfer]:
    """What fills the entry. Raises BadCheckpoint if that is not all of it."""
    _check_compatible(entry, parts[0])
    if not entry.nbytes:
        return []
    item_bytes = entry.nbytes // math.prod(entry.shape)
    target: Bytes = np.ndarray(entry.shape, f"V{item_bytes}", payload, entry.offset)
    wanted = Box(entry.offsets, entry.shape)
    found, filled = [], 0
    for part in parts:
        common = wanted.intersect(part.box)
        if common is not None:
            if part.nbytes != part.box.volume * item_bytes:
                why = f"{part.name} at {part.offsets} has {part.nbytes} bytes"
                raise BadCheckpoint(joined(manifest.uri, MANIFEST), why)
            found.append(_Transfer(part, target, wanted, common))
            filled += common.volume
    if filled != wanted.volume:
        why = f"{entry.name}: {filled} of {wanted.volume} elements are there"
        raise BadCheckpoint(joined(manifest.uri, MANIFEST), why)
    return found


def _check_compatible(entry: TensorEntry, saved: SavedTensor) -> None:
    mine = (entry.dtype.removeprefix("torch."), entry.global_shape, entry.per_rank)
    theirs = (saved.dtype.removeprefix("torch."), saved.global_shape, saved.per_rank)
    if mine != theirs:
        raise IncompatibleCheckpoint(f"{entry.name} is {mine}, the checkpoint has {theirs}")
