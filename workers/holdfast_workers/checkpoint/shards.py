"""Writing one rank's part of a remote checkpoint.

The file is what stock `torch.distributed.checkpoint` would have written (archives of `torch.save`
one after the other), so that stock programs can read it; Holdfast itself reads only the bare
bytes within, whose places go into the record. Written is what this rank alone is to write: its
`primary` boxes and what belongs to the rank itself.
"""

from __future__ import annotations

import hashlib
import os
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from holdfast_workers.checkpoint.manifest import (
    MANIFEST,
    CheckpointExists,
    SavedTensor,
    fsync_folder,
    tensor_record,
)
from holdfast_workers.checkpoint.stock import torch_dtype
from holdfast_workers.layout import StateLayout, TensorEntry

_LOCAL_HEADER_BYTES = 30
_LOCAL_NAME_AT = 26
_LOCAL_EXTRA_AT = 28


def save_shard(
    folder: Path, payload: memoryview, layout: StateLayout, rank: int, attempt: int, step: int
) -> dict[str, Any]:
    """Write this rank's file into `folder` (see `checkpoint_folder`); durable on return.

    `payload` must not change meanwhile. The record returned is JSON; `finalize` wants those of
    all ranks. Raises CheckpointExists if the checkpoint has been published already, OSError if
    it cannot be written; then nothing of that name is left that looks whole.
    """
    if (folder / MANIFEST).exists():
        raise CheckpointExists(f"{folder} has been published; rank {rank} came too late")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"__{rank}_0.distcp"
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("w+b") as stream:
            hashing = _HashingStream(stream)
            saved = [
                _write_tensor(hashing, partial, payload, entry, rank, path.name)
                for entry in layout.tensors
                if entry.primary or entry.per_rank
            ]
            stream.flush()
            os.fsync(stream.fileno())
            nbytes = stream.tell()
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    fsync_folder(folder)
    return {
        "rank": rank,
        "attempt": attempt,
        "step": step,
        "name": path.name,
        "nbytes": nbytes,
        "sha256": hashing.hexdigest(),
        "tensors": [tensor_record(tensor) for tensor in saved],
    }


class _HashingStream:
    """What `torch.save` needs of a file, with the sha256 of all that passed."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._sha256 = hashlib.sha256()

    def write(self, piece: bytes | memoryview) -> int:
        self._sha256.update(piece)
        return self._stream.write(piece)

    def flush(self) -> None:
        self._stream.flush()

    def tell(self) -> int:
        return self._stream.tell()

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


def _write_tensor(
    stream: _HashingStream,
    path: Path,
    payload: memoryview,
    entry: TensorEntry,
    rank: int,
    file: str,
) -> SavedTensor:
    offset = stream.tell()
    torch.save(_as_tensor(payload, entry), stream)  # type: ignore[arg-type]
    stream.flush()
    data_offset = _bare_bytes_at(path) if entry.nbytes else offset
    with path.open("rb") as written:
        # Our own loader trusts this place; a torch that packs otherwise is found out here.
        written.seek(data_offset)
        if written.read(entry.nbytes) != payload[entry.offset : entry.offset + entry.nbytes]:
            raise RuntimeError(f"{path}: torch.save did not store {entry.name} as bare bytes")
    return SavedTensor(
        name=entry.name,
        dtype=entry.dtype,
        global_shape=entry.global_shape,
        offsets=entry.offsets,
        shape=entry.shape,
        per_rank=entry.per_rank,
        rank=rank,
        file=file,
        offset=offset,
        length=stream.tell() - offset,
        data_offset=data_offset,
        nbytes=entry.nbytes,
    )


def _as_tensor(payload: memoryview, entry: TensorEntry) -> torch.Tensor:
    dtype = torch_dtype(entry.dtype)
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    piece = payload[entry.offset : entry.offset + entry.nbytes]
    with warnings.catch_warnings():
        # The payload may be read-only, which torch warns of; nothing writes to the tensor.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(piece, dtype=dtype).view(entry.shape)


def _bare_bytes_at(path: Path) -> int:
    """Where the data of the last archive in the file begins. (zipfile finds the last archive by
    itself, and counts from the beginning of the file.)"""
    with zipfile.ZipFile(path) as archive:
        record = next(item for item in archive.infolist() if item.filename.endswith("/data/0"))
    with path.open("rb") as file:
        file.seek(record.header_offset)
        header = file.read(_LOCAL_HEADER_BYTES)
    name_bytes = int.from_bytes(header[_LOCAL_NAME_AT:_LOCAL_EXTRA_AT], "little")
    extra_bytes = int.from_bytes(header[_LOCAL_EXTRA_AT:], "little")
    return record.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
