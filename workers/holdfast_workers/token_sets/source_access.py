"""Reads the files of sources: streams on this node and from buckets, and copies of objects.

What an operating system or a service fails at is a storage error, which a retry may mend; what a
library finds wrong in the content is a DataRefused.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import ObjectFacts, Storage, TransientStorageError
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.token_sets.file_kinds import HEAD_BYTES, Compression, FileForm, check_head
from holdfast_workers.token_sets.refusals import (
    DataRefused,
    SourceChanged,
    library,
    shortened,
    unreadable,
)
from holdfast_workers.token_sets.source_files import SCHEME, SourceFile, local_facts, split_uri

_READ_BYTES = 1 << 20


class ByteStream(Protocol):
    """Bytes that are read once."""

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes; b"" only at the end."""


class SourceAccess:
    """The files of one source, whose buckets it opens once."""

    def __init__(self, options: StorageOptions, scratch: Path) -> None:
        """`scratch`: a folder for copies of objects, one at a time."""
        self._options = options
        self._scratch = scratch
        self._buckets: dict[str, Storage] = {}

    def check_unchanged(self, file: SourceFile) -> None:
        """Raises SourceChanged unless the file is as it was listed."""
        try:
            found = self._facts(file.name)
        except DataRefused as error:
            raise SourceChanged(f"{error} (it was there when the preparation began)") from error
        if found == ObjectFacts(file.nbytes, file.stamp):
            return
        what = "it was removed" if found is None else "it was written to, or this node has another"
        raise SourceChanged(
            f"{file.name} is not the file that was listed when the preparation began: {what}: let "
            "no program change a source meanwhile, and start again"
        )

    @contextlib.contextmanager
    def opened(self, file: SourceFile, form: FileForm, start: int = 0) -> Iterator[ReadBytes]:
        """The file's bytes from `start` on; `unpacked` expands them. Its head is checked."""
        with self._raw(file.name, start) as readinto:
            stream = ReadBytes(file.name, readinto, form.compression)
            if start == 0:
                stream.check_head(form)
            yield stream

    @contextlib.contextmanager
    def on_disk(self, file: SourceFile, form: FileForm) -> Iterator[Path]:
        """A file on this node with the content. A copy has no name: nothing of it is left when the
        block or the process ends."""
        if not file.name.startswith(SCHEME):
            with self.opened(file, form):
                yield Path(file.name)
            return
        with contextlib.ExitStack() as until_read:
            with self.opened(file, form) as stream, _failures_of(self._scratch):
                self._scratch.mkdir(parents=True, exist_ok=True)
                # Without a buffer, whose bytes a full disk would refuse once more at its end.
                copy = until_read.enter_context(
                    tempfile.TemporaryFile(buffering=0, dir=self._scratch)
                )
                while piece := memoryview(stream.read(_READ_BYTES)):
                    while piece:
                        piece = piece[copy.write(piece) :]
            yield Path(f"/proc/self/fd/{copy.fileno()}")

    def _facts(self, name: str) -> ObjectFacts | None:
        if not name.startswith(SCHEME):
            return local_facts(Path(name))
        storage, key = self._bucket(name)
        return storage.listing(key).get(key)

    def _bucket(self, uri: str) -> tuple[Storage, str]:
        bucket, key = split_uri(uri)
        if bucket not in self._buckets:
            self._buckets[bucket] = open_storage(f"{SCHEME}{bucket}", self._options)
        return self._buckets[bucket], key

    @contextlib.contextmanager
    def _raw(self, name: str, start: int) -> Iterator[Callable[[memoryview], int]]:
        if name.startswith(SCHEME):
            storage, key = self._bucket(name)
            with storage.open(key) as reader:
                yield reader.readinto
            return
        path = Path(name)
        with _unreadable(path):
            stream = path.open("rb", buffering=0)
            stream.seek(start)
        with stream:

            def readinto(buffer: memoryview) -> int:
                with _unreadable(path):
                    return stream.readinto(buffer) or 0

            yield readinto


class ReadBytes:
    """Bytes of a file in order, and how many were taken so far."""

    def __init__(
        self, name: str, readinto: Callable[[memoryview], int], compression: Compression
    ) -> None:
        self._name = name
        self._readinto = readinto
        self._compression = compression
        self._head = b""
        self.taken = 0

    def check_head(self, form: FileForm) -> None:
        self._head = self._read(HEAD_BYTES)
        check_head(self._name, form, self._head)

    def read(self, size: int = -1) -> bytes:
        assert size > 0  # everything at once has no bound
        if self._head:
            piece, self._head = self._head[:size], self._head[size:]
        else:
            piece = self._read(size)
        self.taken += len(piece)
        return piece

    def unpacked(self) -> ByteStream:
        """The content without its compression. Raises DataRefused in `read` if it is damaged."""
        if self._compression is Compression.NONE:
            return self
        return _Unpacked(self._name, self, self._compression)

    def _read(self, size: int) -> bytes:
        buffer = memoryview(bytearray(size))
        return bytes(buffer[: self._readinto(buffer)])


class _Unpacked:
    def __init__(self, name: str, packed: ReadBytes, compression: Compression) -> None:
        arrow = library("pyarrow")
        self._name = name
        self._compression = compression
        self._broken: tuple[type[BaseException], ...] = (OSError, arrow.ArrowException)
        self._stream: Any = arrow.CompressedInputStream(
            arrow.PythonFile(_Readable(packed), mode="r"), compression.value
        )

    def read(self, size: int = -1) -> bytes:
        try:
            return bytes(self._stream.read(size))
        except self._broken as error:
            raise DataRefused(
                f"{self._name} is damaged or cut off: {self._compression.value} cannot unpack it "
                f"({shortened(error)}): copy it again, or remove it"
            ) from error


class _Readable(io.RawIOBase):
    """What Arrow takes for a Python file."""

    def __init__(self, packed: ReadBytes) -> None:
        self._packed = packed

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._packed.read(size) if size > 0 else b""


@contextlib.contextmanager
def _unreadable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unreadable(str(path), error) from error


@contextlib.contextmanager
def _failures_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TransientStorageError(str(path), error.strerror or str(error)) from error
