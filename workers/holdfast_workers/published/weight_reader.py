"""Reads the parts of published weights that a rank has, each byte verified, in bounded memory.

Files are read and never mapped: of a file that another machine cuts short, a read returns less,
and an access to its mapping would end the process.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from holdfast_workers.checkpoint.boxes import Box
from holdfast_workers.errors import WorkersError
from holdfast_workers.models.llama_parameters import hugging_face_name
from holdfast_workers.published.weight_files import OF_PATHS, PublishedTensor
from holdfast_workers.published.weight_set import (
    BadWeightSet,
    WeightFile,
    WeightSet,
    digest_of,
    read_into,
)
from holdfast_workers.spec import Family
from holdfast_workers.state.rank_state import ShardBox

_CHUNKS_AT_ONCE = 4
"""Chunks of rows that are in memory at once; one more, if rows begin or end within chunks."""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WeightsUnavailable(WorkersError):
    """A file cannot be read on this node now; a retry may succeed."""


class PathUnavailable(WeightsUnavailable):
    """A file is not there on this node; if it stays away, only the user can change that."""


class WeightReader:
    """The tensors of a folder, by their published names, as they were when the set was made."""

    def __init__(
        self, folder: Path, weights: WeightSet, on_read: Callable[[], None] = lambda: None
    ) -> None:
        """`on_read` is called before every few chunks; what it raises ends the reading."""
        self._folder = folder
        self._chunk_bytes = weights.chunk_bytes
        self._tensors = {tensor.name: tensor for tensor in weights.tensors}
        self._files = {file.name: file for file in weights.files}
        self._on_read = on_read

    def fill_parameter(
        self, target: Tensor, name: str, box: ShardBox, family: Family = "llama"
    ) -> None:
        """As `fill`, of a parameter of a family, by its name there. With tied embeddings there is
        none of the head."""
        published = hugging_face_name(name) if family == "llama" else name
        tensor = self._tensors.get(published)
        if tensor is None or tensor.shape != box.global_shape:
            found = "is not there" if tensor is None else f"has the shape {tensor.shape}"
            raise BadWeightSet(
                f"{self._folder}: {published} {found}, and the model's {name} {box.global_shape}"
            )
        self.fill(target, published, Box(box.offsets, box.shape))

    def fill(self, target: Tensor, name: str, box: Box) -> None:
        """Copy a box of a tensor into `target`, which has the box's shape; the dtype is converted.
        Raises BadWeightSet, WeightsUnavailable."""
        tensor = self._tensors[name]
        if not box.volume:
            return
        first, rows = (box.offsets[0], box.shape[0]) if box.shape else (0, 1)
        columns = tuple(
            slice(start, start + length)
            for start, length in zip(box.offsets[1:], box.shape[1:], strict=True)
        )
        row_bytes = _DTYPES[tensor.dtype].itemsize * math.prod(tensor.shape[1:])
        at_once = max(1, _CHUNKS_AT_ONCE * self._chunk_bytes // row_bytes)
        with self._opened(self._files[tensor.file]) as descriptor:
            for start in range(0, rows, at_once):
                count = min(at_once, rows - start)
                self._on_read()
                if next_rows := min(at_once, rows - start - count):
                    # Read ahead, while this slab is verified.
                    at = tensor.begin + (first + start + count) * row_bytes
                    os.posix_fadvise(descriptor, at, next_rows * row_bytes, os.POSIX_FADV_WILLNEED)
                slab = self._rows(descriptor, tensor, row_bytes, first + start, count)
                if box.shape:
                    target[start : start + count].copy_(slab[(slice(None), *columns)])
                else:
                    target.copy_(slab[0])

    def _rows(
        self, descriptor: int, tensor: PublishedTensor, row_bytes: int, first: int, count: int
    ) -> Tensor:
        """These rows of a tensor; the one number of a tensor without dimensions is a row."""
        dtype = _DTYPES[tensor.dtype]
        begin = tensor.begin + first * row_bytes
        content, at = self._verified(
            descriptor, self._files[tensor.file], begin, begin + count * row_bytes, dtype.itemsize
        )
        numbers = count * row_bytes // dtype.itemsize
        flat = torch.frombuffer(content, dtype=dtype, count=numbers, offset=at)
        return flat.view(count, *tensor.shape[1:])

    def _verified(
        self, descriptor: int, file: WeightFile, begin: int, end: int, alignment: int
    ) -> tuple[bytearray, int]:
        """The chunks with the bytes from `begin` to `end` of a file, and where these are in them:
        at a multiple of `alignment`."""
        size = self._chunk_bytes
        first, last = begin // size, -(-end // size)
        start, stop = first * size, min(last * size, file.nbytes)
        padding = (start - begin) % alignment
        content = bytearray(padding + stop - start)
        chunks = memoryview(content)[padding:]
        count = read_into(descriptor, chunks, start)
        if count != len(chunks):
            raise self._changed(file, f"it ends at byte {start + count} of {file.nbytes}")
        for index in range(first, last):
            at = (index - first) * size
            if digest_of(chunks[at : at + size]) != file.chunks[index]:
                upto = min((index + 1) * size, file.nbytes)
                raise self._changed(file, f"its bytes {index * size} to {upto} are others")
        return content, padding + begin - start

    @contextmanager
    def _opened(self, file: WeightFile) -> Iterator[int]:
        """The descriptor of a file; raises errors of the operating system as this class's."""
        path = self._folder / file.name
        try:
            with path.open("rb", buffering=0) as opened:
                if (size := os.fstat(opened.fileno()).st_size) != file.nbytes:
                    raise self._changed(file, f"it has {size} bytes, and had {file.nbytes}")
                yield opened.fileno()
        except OSError as error:
            where = f"{path}: {error.strerror or error}, on the node {socket.gethostname()}"
            if isinstance(error, PermissionError):
                raise BadWeightSet(
                    f"{where}: user {os.getuid()} must be able to read it"
                ) from error
            kind = PathUnavailable if error.errno in OF_PATHS else WeightsUnavailable
            raise kind(f"{where}: each node must be able to read {self._folder}") from error

    def _changed(self, file: WeightFile, how: str) -> BadWeightSet:
        return BadWeightSet(
            f"{self._folder / file.name} has changed since the job was submitted, or is damaged: "
            f"{how}: restore it, or submit the job again"
        )
