"""Writing one rank's part of a remote checkpoint.

The file is what stock `torch.distributed.checkpoint` would have written (archives of `torch.save`
one after the other), so that stock programs can read it; Holdfast itself reads only the bare
bytes within, whose places go into the record. Written is what this rank alone is to write: its
`primary` boxes and what belongs to the rank itself.
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
    at: Storage, payload: memoryview, layout: StateLayout, rank: int, attempt: int, step: int
) -> dict[str, Any]:
    """Write this rank's file into the checkpoint rooted at `at`; durable on return.

    It is written and hashed in one pass, in bounded memory. `payload` must not change meanwhile.
    The record returned is JSON; `finalize` wants those of all ranks. Raises CheckpointExists if
    the checkpoint has been published already, StorageError if it cannot be written; then nothing
    of that name is left that looks whole.
    """
    if MANIFEST in at.objects():
        raise CheckpointExists(f"{at.uri} has been published; rank {rank} came too late")
    name = f"__{rank}_0.distcp"
    with at.write(name) as stream:
        hashing = _HashingStream(stream)
        saved = [
            _write_tensor(hashing, payload, entry, rank, name)
            for entry in layout.tensors
            if entry.primary or entry.per_rank
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
    """What `torch.save` needs of a file, with the sha256 of all that passed.

    What has passed cannot be read back, so the pieces of the archive being written are noted.
    """

    def __init__(self, stream: ObjectWriter) -> None:
        self._stream = stream
        self._sha256 = hashlib.sha256()
        self.small = bytearray()
        """Small pieces of the archive, one after the other."""
        self.large: list[tuple[int, int, str]] = []
        """Offset in the file, size and digest of large ones."""

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
        """Forget the pieces of the last archive; where the next one begins."""
        self.small.clear()
        self.large.clear()
        return self._stream.tell()

    def flush(self) -> None:
        """Nothing: what is written counts from the end of the whole object."""

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
    data_offset = _bare_bytes_at(stream, offset, piece) if entry.nbytes else offset
    if data_offset is None:
        # Our own loader trusts this place; a torch that packs otherwise is found out here.
        raise RuntimeError(f"{file}: torch.save did not store {entry.name} as bare bytes")
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


def _bare_bytes_at(stream: _HashingStream, archive_at: int, piece: memoryview) -> int | None:
    """Where in the file the archive just written has these bytes of a tensor, and nowhere else;
    None if it does not have them in one piece."""
    if stream.large:
        expected = (piece.nbytes, payload_digest(piece))
        found = [at for at, nbytes, digest in stream.large if (nbytes, digest) == expected]
        return found[0] if len(found) == 1 else None
    archive = bytes(stream.small)
    with zipfile.ZipFile(io.BytesIO(archive)) as records:
        record = next(item for item in records.infolist() if item.filename.endswith("/data/0"))
    header = archive[record.header_offset : record.header_offset + _LOCAL_HEADER_BYTES]
    name_bytes = int.from_bytes(header[_LOCAL_NAME_AT:_LOCAL_EXTRA_AT], "little")
    extra_bytes = int.from_bytes(header[_LOCAL_EXTRA_AT:], "little")
    at = record.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    return archive_at + at if archive[at : at + piece.nbytes] == piece else None
