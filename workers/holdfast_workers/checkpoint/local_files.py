"""Storage on a file system: a local disk, or one shared over NFS.

A file is written under a hidden name, synced and then renamed, so that it appears whole. A file
that must be new is hard-linked, because a link, unlike a rename, fails if the name is taken.
Folders are synced after their entries change: a write that has returned survives a power loss.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from holdfast_workers.checkpoint.storage import (
    ObjectExists,
    ObjectFacts,
    ObjectMissing,
    ObjectReader,
    ObjectWriter,
    StorageDenied,
    TransientStorageError,
)
from holdfast_workers.private_files import sync_folder

_PARTIAL = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
_MOST_READ_WHOLE = 1 << 30
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


class LocalStorage:
    """A `Storage` below a folder. Folders are created on the first write into them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def uri(self) -> str:
        return str(self._root)

    def below(self, folder: str) -> LocalStorage:
        return LocalStorage(self._root / folder)

    @contextlib.contextmanager
    def write(self, name: str) -> Iterator[ObjectWriter]:
        path = self._root / name
        with self._partial(path) as (partial, stream):
            yield _Writer(stream, path)
            with _translated(path):
                _sync(stream)
                partial.rename(path)
                sync_folder(path.parent)

    def put_new(self, name: str, content: bytes) -> None:
        path = self._root / name
        with self._partial(path) as (partial, stream), _translated(path):
            stream.write(content)
            _sync(stream)
            sync_folder(path.parent)  # earlier writes must not be less durable than this file
            try:
                path.hardlink_to(partial)
            except FileExistsError as error:
                raise ObjectExists(str(path)) from error
            sync_folder(path.parent)

    def read(self, name: str) -> bytes:
        path = self._root / name
        with _translated(path):
            size = _size_of_file(path)
            if size > _MOST_READ_WHOLE:
                raise StorageDenied(str(path), f"it has {size} bytes, too many to be read at once")
            return path.read_bytes()

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[ObjectReader]:
        path = self._root / name
        with _translated(path):
            _size_of_file(path)
            stream = path.open("rb", buffering=0)
        with stream:
            yield _Reader(stream, path)

    def objects(self) -> dict[str, int]:
        return {name: facts.nbytes for name, facts in self.listing().items()}

    def listing(self, prefix: str = "") -> dict[str, ObjectFacts]:
        with _translated(self._root):
            named = ((str(path.relative_to(self._root)), path) for path in _files(self._root))
            found = ((name, _facts(path)) for name, path in named if name.startswith(prefix))
            return {name: facts for name, facts in found if facts is not None}

    def folders(self) -> list[str]:
        with _translated(self._root):
            try:
                return sorted(path.name for path in self._root.iterdir() if path.is_dir())
            except FileNotFoundError:
                return []

    def delete(self, name: str) -> None:
        path = self._root / name
        with _translated(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
            sync_folder(path.parent)

    def delete_broken(self) -> None:
        with _translated(self._root):
            for folder, _folders, names in os.walk(self._root, onerror=_raise_unless_gone):
                for name in filter(_PARTIAL.fullmatch, names):
                    Path(folder, name).unlink(missing_ok=True)

    def delete_all(self) -> None:
        with _translated(self._root), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._root)
            sync_folder(self._root.parent)

    @contextlib.contextmanager
    def _partial(self, path: Path) -> Iterator[tuple[Path, IO[bytes]]]:
        """A hidden file beside `path`; removed at the end of the block unless it was renamed."""
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        with _translated(path):
            _make_folder(path.parent)
            stream = partial.open("wb")
        try:
            yield partial, stream
        finally:
            with contextlib.suppress(OSError):  # a full disk, which an earlier error reports
                stream.close()
            partial.unlink(missing_ok=True)


def facts_of_file(status: os.stat_result) -> ObjectFacts:
    return ObjectFacts(status.st_size, str(status.st_mtime_ns))


class _Writer:
    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self._stream = stream
        self._path = path

    def write(self, piece: bytes | memoryview) -> int:
        with _translated(self._path):
            return self._stream.write(piece)

    def tell(self) -> int:
        return self._stream.tell()


class _Reader:
    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self._stream = stream
        self._path = path

    def readinto(self, buffer: memoryview) -> int:
        filled = 0
        with _translated(self._path):
            while filled < len(buffer):
                count: int = self._stream.readinto(buffer[filled:])  # type: ignore[attr-defined]
                if not count:
                    break
                filled += count
        return filled


def _size_of_file(path: Path) -> int:
    """Raises StorageDenied for anything but a file: a pipe that nobody writes would block."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise StorageDenied(str(path), "it is no regular file")
    return status.st_size


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Raise the operating system's errors as storage errors."""
    try:
        yield
    except OSError as error:
        uri, reason = str(error.filename or path), error.strerror or str(error)
        if error.errno in _NOT_THERE:
            raise ObjectMissing(uri) from error
        if error.errno == errno.ENAMETOOLONG:
            raise StorageDenied(uri, f"{reason}: use a shorter path") from error
        if error.errno in _DENIED:
            user = os.getuid()
            raise StorageDenied(
                uri, f"{reason}: user {user} must be able to write there"
            ) from error
        raise TransientStorageError(uri, reason) from error


def _files(root: Path) -> Iterator[Path]:
    """Every finished file below `root`."""
    for folder, _folders, names in os.walk(root, onerror=_raise_unless_gone):
        for name in names:
            if _PARTIAL.fullmatch(name) is None:
                yield Path(folder, name)


def _facts(path: Path) -> ObjectFacts | None:
    """None: the file has vanished meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return facts_of_file(path.stat())
    return None


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _make_folder(folder: Path) -> None:
    """Create the folder and its missing ancestors, each durable in its parent."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for ancestor in reversed(missing):
        ancestor.mkdir(exist_ok=True)
        sync_folder(ancestor.parent)


def _sync(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
