"""Writes one rank's part of a remote checkpoint.

The file has the format of stock `torch.distributed.checkpoint` (consecutive archives of
`torch.save`), so that stock programs can read it. Holdfast itself reads only the raw bytes of the
tensors inside, whose places it records. A rank writes its `primary` boxes, its per-rank entries,
and of local entries its own values: those of the primary are the tensor's, those of every other
rank are per-rank.
"""

from __future__ import annotations

import hashlib
import io
import warnings
import zipfile
from typing import Any

import torch

from holdfast_workers.checkpoint.manifest import (
    MANIFEST,
    CheckpointExists,
    SavedTensor,
    tensor_record,
)
from holdfast_workers.checkpoint.stock import torch_dtype
from holdfast_workers.checkpoint.storage import ObjectWriter, Storage
from holdfast_workers.state.digest import payload_digest
from holdfast_workers.state.layout import StateLayout, TensorEntry

_SMALL_BYTES = 64 * 1024
_LOCAL_HEADER_BYTES = 30
_LOCAL_NAME_AT = 26
_LOCAL_EXTRA_AT = 28


def save_shard(
    checkpoint: Storage,
    payload: memoryview,
    layout: StateLayout,
    rank: int,
    attempt: int,
    step: int,
) -> dict[str, Any]:
    """Write this rank's file into `checkpoint`; durable on return.

    The file is written and hashed in one pass, in bounded memory. `payload` must not change
    meanwhile. The returned record is JSON; `finalize` needs the records of all ranks. Raises
    CheckpointExists if the checkpoint has already been published, StorageError if the file cannot
    be written; then no file of that name appears.
    """
    if MANIFEST in checkpoint.objects():
        raise CheckpointExists(f"{checkpoint.uri} has been published; rank {rank} came too late")
    name = f"__{rank}_0.distcp"
    with checkpoint.write(name) as stream:
        hashing = _HashingStream(stream)
        saved = [
            _write_tensor(hashing, payload, entry, rank, name)
            for entry in layout.tensors
            if entry.primary or entry.per_rank or entry.local
        ]
        nbytes = stream.tell()
    return {
        "rank": rank,
        "attempt": attempt,
        "step": step,
        "name": name,
        "nbytes": nbytes,
        "sha256": hashing.hexdigest(),
        "tensors": [tensor_record(tensor) for tensor in saved],
    }


class _HashingStream:
    """The file object that `torch.save` writes to; computes the sha256 of everything written.

    Written bytes cannot be read back, so the stream remembers the pieces of the current archive.
    """

    def __init__(self, stream: ObjectWriter) -> None:
        self._stream = stream
        self._sha256 = hashlib.sha256()
        self.small = bytearray()
        """The small pieces of the archive, concatenated."""
        self.large: list[tuple[int, int, str]] = []
        """Offset in the file, size and digest of each large piece."""

    def write(self, piece: bytes | memoryview) -> int:
        nbytes = len(piece)
        if nbytes > _SMALL_BYTES:
            self.large.append((self._stream.tell(), nbytes, payload_digest(piece)))
        else:
            self.small += piece
        self._sha256.update(piece)
        self._stream.write(piece)
        return nbytes

    def begin_archive(self) -> int:
        """Forget the pieces of the last archive; return the offset of the next one."""
        self.small.clear()
        self.large.clear()
        return self._stream.tell()

    def flush(self) -> None:
        """Does nothing: the object becomes durable at its end."""

    def tell(self) -> int:
        return self._stream.tell()

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


def _write_tensor(
    stream: _HashingStream, payload: memoryview, entry: TensorEntry, rank: int, file: str
) -> SavedTensor:
    offset = stream.begin_archive()
    torch.save(_as_tensor(payload, entry), stream)  # type: ignore[arg-type]
    piece = payload[entry.offset : entry.offset + entry.nbytes]
    data_offset = _find_raw_bytes(stream, offset, piece) if entry.nbytes else offset
    if data_offset is None:
        # Holdfast's loader trusts this offset; this check catches a torch with another format.
        raise RuntimeError(f"{file}: torch.save did not store {entry.name} as raw bytes")
    return SavedTensor(
        name=entry.name,
        dtype=entry.dtype,
        global_shape=entry.global_shape,
        offsets=entry.offsets,
        shape=entry.shape,
        per_rank=entry.per_rank or (entry.local and not entry.primary),
        rank=rank,
        file=file,
        offset=offset,
        length=stream.tell() - offset,
        data_offset=data_offset,
        nbytes=entry.nbytes,
        weight=entry.weight,
    )


def _as_tensor(payload: memoryview, entry: TensorEntry) -> torch.Tensor:
    dtype = torch_dtype(entry.dtype)
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    piece = payload[entry.offset : entry.offset + entry.nbytes]
    with warnings.catch_warnings():
        # torch warns if the payload is read-only; nothing writes to the tensor.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(piece, dtype=dtype).view(entry.shape)


def _find_raw_bytes(stream: _HashingStream, archive_at: int, piece: memoryview) -> int | None:
    """The offset in the file at which the last archive holds a tensor's bytes; None if it does not
    hold them in one piece, or holds them more than once."""
    if stream.large:
        expected = (piece.nbytes, payload_digest(piece))
        offsets = [
            offset for offset, nbytes, digest in stream.large if (nbytes, digest) == expected
        ]
        return offsets[0] if len(offsets) == 1 else None
    archive = bytes(stream.small)
    with zipfile.ZipFile(io.BytesIO(archive)) as records:
        record = next(item for item in records.infolist() if item.filename.endswith("/data/0"))
    header = archive[record.header_offset : record.header_offset + _LOCAL_HEADER_BYTES]
    name_bytes = int.from_bytes(header[_LOCAL_NAME_AT:_LOCAL_EXTRA_AT], "little")
    extra_bytes = int.from_bytes(header[_LOCAL_EXTRA_AT:], "little")
    start = record.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    return archive_at + start if archive[start : start + piece.nbytes] == piece else None
