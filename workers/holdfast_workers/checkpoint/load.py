"""Fills a rank's payload from a checkpoint that any mesh wrote. No torch, no pickle.

Each file that holds a wanted box is streamed once, from its beginning to its end: wanted bytes go
straight to their place in the payload, all bytes go through the sha256. So the bytes that are
taken are the bytes that are verified, each is moved once, and memory is bounded. The price: the
payload is valid only after all files have been verified, which is when `load_state` returns.
The loader reads raw bytes at the places that the manifest records, by the intersections of boxes.
A rank of the same mesh finds its own boxes whole; a rank of another mesh gathers its parts from
several files. Of a local entry, a rank of the same mesh takes its own values, any other rank those
of the primary.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from holdfast_workers.checkpoint.boxes import Box
from holdfast_workers.checkpoint.manifest import (
    MANIFEST,
    BadCheckpoint,
    CheckpointError,
    IncompatibleCheckpoint,
    Manifest,
    OnRead,
    SavedTensor,
    VerifiedReader,
    complete_manifest,
    listed,
)
from holdfast_workers.checkpoint.manifest_checks import check_bytes, check_sizes
from holdfast_workers.checkpoint.storage import Storage, joined
from holdfast_workers.state.layout import StateLayout, TensorEntry, module_of
from holdfast_workers.state.object_room import rooms, with_rooms

Bytes = npt.NDArray[np.void]

_SLAB_BYTES = 16 * 1024 * 1024


def load_state(
    checkpoint: Storage,
    layout: StateLayout,
    payload: memoryview,
    *,
    mesh: dict[str, int],
    rank: int,
    on_read: OnRead = lambda _: None,
) -> list[str]:
    """Fill `payload`, laid out by `layout`, and return the names of the entries left unchanged.

    Left unchanged are entries that the checkpoint does not have, and per-rank entries unless
    `mesh` is the checkpoint's own. Raises BadCheckpoint if the checkpoint is not complete or a
    file is not as it was saved (the payload is then invalid), IncompatibleCheckpoint if a shape or
    dtype differs, StorageError if it cannot be read.
    """
    return _load(checkpoint, _readable(checkpoint), layout, payload, mesh, rank, on_read)


def load_whole_state(
    checkpoint: Storage,
    layout: StateLayout,
    payload: memoryview,
    *,
    mesh: dict[str, int],
    rank: int,
    exact: bool = False,
) -> None:
    """Load like `load_state`, but raise IncompatibleCheckpoint also if the checkpoint lacks an
    entry that is not per-rank: only per-rank entries may be left unchanged. With `exact`, raise it
    also for weights of a model that `layout` does not have."""
    manifest = _readable(checkpoint)
    saved = {tensor.name for tensor in manifest.tensors if not tensor.per_rank}
    own = {entry.name for entry in layout.tensors}
    missing = [
        e for e in layout.tensors if not (e.per_rank or e.name in saved) and 0 not in e.global_shape
    ]
    weights = dict.fromkeys(tensor.name for tensor in manifest.tensors if tensor.weight)
    unexpected = [name for name in weights if name not in own]
    if missing or (exact and unexpected):
        raise IncompatibleCheckpoint(_other_names(checkpoint.uri, missing, unexpected))
    _load(checkpoint, manifest, layout, payload, mesh, rank)


def _load(
    checkpoint: Storage,
    manifest: Manifest,
    layout: StateLayout,
    payload: memoryview,
    mesh: dict[str, int],
    rank: int,
    on_read: OnRead = lambda _: None,
) -> list[str]:
    parts = _parts_for(rank, mesh, manifest)
    _require_room(checkpoint, manifest, layout, parts)
    missing = []
    wanted: dict[str, list[_Transfer]] = defaultdict(list)
    for entry in layout.tensors:
        if entry.name not in parts:
            if math.prod(entry.global_shape):  # no rank saves a tensor without elements
                missing.append(entry.name)
            continue
        for transfer in _transfers(entry, payload, parts[entry.name], manifest):
            wanted[transfer.source.file].append(transfer)
    for file in manifest.files:
        if file.name in wanted:
            with VerifiedReader(checkpoint, file, on_read) as stream:
                for transfer in sorted(
                    wanted[file.name], key=lambda transfer: transfer.source.data_offset
                ):
                    transfer.copy_from(stream)
    return missing


def _other_names(uri: str, missing: Sequence[TensorEntry], unexpected: Sequence[str]) -> str:
    """Why the checkpoint does not fit, with the names of both sides."""
    here = {module_of(entry.name) for entry in missing if entry.weight}
    there = {module_of(name) for name in unexpected}
    why = f"{uri} has no {listed([entry.name for entry in missing])}" if missing else uri
    if unexpected:
        why += f"{',' if missing else ''} has {listed(unexpected)}, which this rank has not"
    if here and there and here.isdisjoint(there):
        return (
            f"{why}: register each module under the name that it was saved with "
            f"({', '.join(sorted(there))} there, {', '.join(sorted(here))} here)"
        )
    return f"{why}: to begin with a part of it, export it and load the file yourself"


class OtherRoom(CheckpointError):
    """Objects have another room in the checkpoint than in the layout; `rooms`: theirs there."""

    def __init__(self, rooms: dict[str, int]) -> None:
        super().__init__(f"objects have another room in the checkpoint: {rooms}")
        self.rooms = rooms


def _require_room(
    checkpoint: Storage,
    manifest: Manifest,
    layout: StateLayout,
    parts: dict[str, list[SavedTensor]],
) -> None:
    objects = {name: parts[name][0] for name in rooms(layout) if name in parts}
    found = {name: saved.nbytes for name, saved in objects.items()}
    if with_rooms(layout, found) != layout:
        # Memory of that size is allocated next: the files must have the bytes for it.
        check_bytes(manifest, objects.values())
        check_sizes(manifest, checkpoint.objects())
        raise OtherRoom(found)


class _Transfer:
    """Copies the part that one saved box and one entry of the payload have in common."""

    def __init__(self, source: SavedTensor, target: Bytes, wanted: Box, common: Box) -> None:
        self.source = source
        self._target = target
        self._wanted = wanted
        self._common = common
        self._item_bytes = target.dtype.itemsize

    def copy_from(self, stream: VerifiedReader) -> None:
        stream.skip_to(self.source.data_offset)
        if self.source.box == self._wanted:
            stream.readinto(self._target.reshape(-1).view(np.uint8).data)
            return
        for slab in self._slabs():
            # Pages without bytes take no memory: the file may be shorter than its manifest says.
            raw = np.empty(slab.volume * self._item_bytes, np.uint8).data
            stream.readinto(raw)
            common = slab.intersect(self._common)
            if common is not None:
                saved: Bytes = np.ndarray(slab.shape, self._target.dtype, raw)
                self._target[common.within(self._wanted)] = saved[common.within(slab)]

    def _slabs(self) -> list[Box]:
        """The saved box, cut along its first dimension so that each slab fits into memory."""
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


def _readable(checkpoint: Storage) -> Manifest:
    manifest = complete_manifest(checkpoint)
    if manifest.byteorder != sys.byteorder:
        raise IncompatibleCheckpoint(
            f"{checkpoint.uri} was written on a {manifest.byteorder}-endian host"
        )
    return manifest


def _parts_for(rank: int, mesh: dict[str, int], manifest: Manifest) -> dict[str, list[SavedTensor]]:
    """The saved boxes that count for the rank, by the tensor's name. A box of its own counts alone:
    a local entry has another one of the primary."""
    parts: dict[str, list[SavedTensor]] = defaultdict(list)
    own: dict[str, list[SavedTensor]] = {}
    for tensor in manifest.tensors:
        if not tensor.per_rank:
            parts[tensor.name].append(tensor)
        elif tensor.rank == rank and manifest.mesh == mesh:
            own[tensor.name] = [tensor]
    return {**parts, **own}


def _transfers(
    entry: TensorEntry, payload: memoryview, parts: list[SavedTensor], manifest: Manifest
) -> list[_Transfer]:
    """The transfers that fill the entry. Raises BadCheckpoint if they do not fill all of it."""
    _check_compatible(entry, parts[0])
    if not entry.nbytes:
        return []
    item_bytes = entry.nbytes // math.prod(entry.shape)
    target: Bytes = np.ndarray(entry.shape, f"V{item_bytes}", payload, entry.offset)
    wanted = Box(entry.offsets, entry.shape)
    transfers, filled = [], 0
    for part in parts:
        common = wanted.intersect(part.box)
        if common is not None:
            if part.nbytes != part.box.volume * item_bytes:
                reason = f"{part.name} at {part.offsets} has {part.nbytes} bytes"
                raise BadCheckpoint(joined(manifest.uri, MANIFEST), reason)
            transfers.append(_Transfer(part, target, wanted, common))
            filled += common.volume
    if filled != wanted.volume:
        reason = f"{entry.name}: {filled} of {wanted.volume} elements are present"
        raise BadCheckpoint(joined(manifest.uri, MANIFEST), reason)
    return transfers


def _check_compatible(entry: TensorEntry, saved: SavedTensor) -> None:
    mine = (entry.dtype.removeprefix("torch."), entry.global_shape, entry.per_rank)
    per_rank = saved.per_rank and not entry.local
    theirs = (saved.dtype.removeprefix("torch."), saved.global_shape, per_rank)
    if mine != theirs:
        raise IncompatibleCheckpoint(f"{entry.name} is {mine}, the checkpoint has {theirs}")
