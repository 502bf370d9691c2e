"""Filling a rank's payload from a checkpoint that any mesh wrote. No torch, no pickle.

Every file is verified against the manifest's sha256 before a byte of it is used. What is read is
bare bytes at the places that the manifest names, by the intersections of boxes; a rank of the
same mesh finds its own boxes whole, another gathers its parts from several files.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections import defaultdict
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from holdfast_workers.checkpoint.boxes import Box
from holdfast_workers.checkpoint.manifest import (
    MANIFEST,
    BadCheckpoint,
    IncompatibleCheckpoint,
    Manifest,
    SavedTensor,
    read_manifest,
    verify_file,
)
from holdfast_workers.layout import StateLayout, TensorEntry

Bytes = npt.NDArray[np.void]


def load_state(
    folder: Path, layout: StateLayout, payload: memoryview, *, mesh: dict[str, int], rank: int
) -> list[str]:
    """Fill `payload`, laid out by `layout`, and return the names that were left as they were.

    Left are entries that the checkpoint does not have, and per-rank entries unless `mesh` is the
    checkpoint's own. Raises BadCheckpoint if the checkpoint is not complete or a file is not as
    it was saved (the payload is then of no use), IncompatibleCheckpoint if a shape or dtype
    differs.
    """
    manifest = _complete(folder)
    parts: dict[str, list[SavedTensor]] = defaultdict(list)
    for tensor in manifest.tensors:
        if not tensor.per_rank or (tensor.rank == rank and manifest.mesh == mesh):
            parts[tensor.name].append(tensor)
    missing = []
    with _VerifiedFiles(manifest) as files:
        for entry in layout.tensors:
            if entry.name in parts:
                _fill(entry, payload, parts[entry.name], files)
            else:
                missing.append(entry.name)
    return missing


def read_entry(folder: Path, name: str, rank: int) -> bytes:
    """The bytes of a per-rank entry as `rank` of the checkpoint's own mesh saved it.

    Raises KeyError if there is none, BadCheckpoint as `load_state` does.
    """
    manifest = _complete(folder)
    for tensor in manifest.tensors:
        if tensor.per_rank and (tensor.name, tensor.rank) == (name, rank):
            with _VerifiedFiles(manifest) as files:
                return files.bytes_of(tensor)
    raise KeyError(f"{folder} has no {name!r} of rank {rank}")


class _VerifiedFiles:
    """The checkpoint's files, mapped, each verified when it is first asked for."""

    def __init__(self, manifest: Manifest) -> None:
        self.folder = manifest.folder
        self._files = {file.name: file for file in manifest.files}
        self._mapped: dict[str, mmap.mmap] = {}

    def bytes_of(self, tensor: SavedTensor) -> bytes:
        return self._map(tensor.file)[tensor.data_offset : tensor.data_offset + tensor.nbytes]

    def array(self, tensor: SavedTensor, item_bytes: int) -> Bytes:
        """The tensor's elements as bare bytes, in its shape."""
        mapped = self._map(tensor.file)
        return np.ndarray(tensor.shape, f"V{item_bytes}", mapped, tensor.data_offset)

    def __enter__(self) -> _VerifiedFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mapped.clear()  # unmapped once no array is left of them

    def _map(self, name: str) -> mmap.mmap:
        if name not in self._mapped:
            verify_file(self.folder, self._files[name])
            with (self.folder / name).open("rb") as file:
                self._mapped[name] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return self._mapped[name]


def _complete(folder: Path) -> Manifest:
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError as error:
        raise BadCheckpoint(folder / MANIFEST, "there is none: not complete") from error
    if manifest.byteorder != sys.byteorder:
        raise IncompatibleCheckpoint(f"{folder} was written on a {manifest.byteorder}-endian host")
    return manifest


def _fill(
    entry: TensorEntry, payload: memoryview, parts: list[SavedTensor], files: _VerifiedFiles
) -> None:
    _check_compatible(entry, parts[0])
    if not entry.nbytes:
        return
    item_bytes = entry.nbytes // math.prod(entry.shape)
    target: Bytes = np.ndarray(entry.shape, f"V{item_bytes}", payload, entry.offset)
    wanted = Box(entry.offsets, entry.shape)
    filled = 0
    for part in parts:
        common = wanted.intersect(part.box)
        if common is not None:
            source = files.array(part, item_bytes)
            target[common.within(wanted)] = source[common.within(part.box)]
            filled += common.volume
    if filled != wanted.volume:
        raise BadCheckpoint(
            files.folder / MANIFEST, f"{entry.name}: {filled} of {wanted.volume} elements are there"
        )


def _check_compatible(entry: TensorEntry, saved: SavedTensor) -> None:
    mine = (entry.dtype.removeprefix("torch."), entry.global_shape, entry.per_rank)
    theirs = (saved.dtype.removeprefix("torch."), saved.global_shape, saved.per_rank)
    if mine != theirs:
        raise IncompatibleCheckpoint(f"{entry.name} is {mine}, the checkpoint has {theirs}")
