"""The manifest of published weights: their tensors, and a digest for every few megabytes.

Ranks read some rows of a tensor, and verify what they read: so a file has a digest for each of its
chunks, and none as a whole. The manifest's own digest stands in a job's record: with the same
digest, the bytes are the same, wherever the folder is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from holdfast_workers.errors import WorkersError
from holdfast_workers.published.weight_files import PublishedTensor, UnfitWeights, opened

CHUNK_BYTES = 4 << 20
"""Bytes that a digest is of; the last chunk of a file may be shorter."""
FORMAT = "holdfast.weights"
VERSION = 1
MANIFEST = "manifest.json"
"""The object with a set, in the set's folder of a store."""
OTHERS = "files"
"""The folder beside it with the model's small files."""


class BadWeightSet(WorkersError):
    """The manifest, or a file, is not what its digest says."""


@dataclass(frozen=True)
class WeightFile:
    name: str
    nbytes: int
    chunks: tuple[str, ...]
    """The digest of each chunk."""

    @classmethod
    def of(cls, name: str, content: bytes, chunk_bytes: int = CHUNK_BYTES) -> WeightFile:
        """The small file with this content."""
        starts = range(0, len(content), chunk_bytes)
        chunks = tuple(digest_of(content[at : at + chunk_bytes]) for at in starts)
        return cls(name, len(content), chunks)


@dataclass(frozen=True)
class WeightSet:
    config: Mapping[str, Any]
    """The folder's `config.json`."""
    files: tuple[WeightFile, ...]
    tensors: tuple[PublishedTensor, ...]
    others: tuple[WeightFile, ...] = ()
    """The small files that belong to the model: of its tokenizer, and for generation."""
    chunk_bytes: int = CHUNK_BYTES

    def encode(self) -> bytes:
        """Equal for equal sets."""
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> str:
        return digest_of(self.encode())

    @classmethod
    def decode(cls, content: bytes, digest: str, where: str) -> WeightSet:
        """Raises BadWeightSet if the content has another digest, or is of another version."""
        if (found := digest_of(content)) != digest:
            raise BadWeightSet(f"{where} is damaged: its digest is {found} and not {digest}")
        document = json.loads(content)
        if (document["format"], document["version"]) != (FORMAT, VERSION):
            raise BadWeightSet(f"{where} was written by another version of Holdfast")
        tensors = (
            PublishedTensor(**{**each, "shape": tuple(each["shape"])})
            for each in document["tensors"]
        )
        files, others = (
            tuple(
                WeightFile(**{**each, "chunks": tuple(each["chunks"])}) for each in document[kind]
            )
            for kind in ("files", "others")
        )
        return cls(document["config"], files, tuple(tensors), others, document["chunk_bytes"])


def digest_of(content: bytes | bytearray | memoryview) -> str:
    """XXH3, 128 bits."""
    return str(xxhash.xxh3_128_hexdigest(content))


def digest_file(
    path: Path, on_read: Callable[[int], None], chunk_bytes: int = CHUNK_BYTES
) -> WeightFile:
    """Read a file from its beginning to its end, in the memory of a chunk; `on_read` gets the bytes
    of each chunk that was read. Raises UnfitWeights if the file changes meanwhile, and OSError."""
    chunks: list[str] = []
    buffer = memoryview(bytearray(chunk_bytes))
    with opened(path) as file:
        before = os.fstat(file.fileno())
        for at in range(0, before.st_size, chunk_bytes):
            count = read_into(file.fileno(), buffer, at)
            chunks.append(digest_of(buffer[:count]))
            on_read(count)
        stamps = {_stamp(each) for each in (before, os.fstat(file.fileno()), path.stat())}
    if len(stamps) > 1:
        raise UnfitWeights(f"{path} changes while it is read: submit the job once it is whole")
    return WeightFile(path.name, before.st_size, tuple(chunks))


def read_into(descriptor: int, buffer: memoryview, at: int) -> int:
    """Fill the buffer with the bytes of a file from `at` on; returns fewer bytes than it holds only
    at the file's end. Raises OSError."""
    filled = 0
    while filled < len(buffer):
        count = os.preadv(descriptor, [buffer[filled:]], at + filled)
        if not count:
            break
        filled += count
    return filled


def _stamp(status: os.stat_result) -> tuple[int, int, int, int]:
    """Another one after each change; of a file that took its place, too."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
