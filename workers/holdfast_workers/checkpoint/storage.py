"""The storage of remote checkpoints: named objects below a root, on a file system or in a bucket.

Callers rely on three guarantees: an object appears whole and durable, or not at all; an object
made with `put_new` is never replaced; every wait ends. A checkpoint is a `Storage` rooted at its
folder, and its address is that root's URI: `/path/step-00000007.attempt-1`,
`s3://bucket/prefix/step-...`. Names are relative, with `/` between folders; there is no rename.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import SplitResult, unquote, urlsplit

from holdfast_workers.errors import WorkersError

_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}")


class StorageError(WorkersError):
    """A storage operation failed. The message names the storage, the failure and the remedy."""

    def __init__(self, uri: str, reason: str) -> None:
        super().__init__(f"{uri}: {reason}")
        self.uri = uri
        self.reason = reason


class TransientStorageError(StorageError):
    """A retry may succeed: a time-out, a server error, a full disk, a bucket that is gone."""


class StorageDenied(StorageError):
    """Credentials or permissions do not allow the operation; a retry does not help."""


class ObjectMissing(StorageError):
    """The object does not exist."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri, "it does not exist")


class ObjectExists(StorageError):
    """The object exists already and stays unchanged."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri, "it already exists")


@dataclass(frozen=True)
class ObjectFacts:
    nbytes: int
    stamp: str
    """Another one after each change: a file's time of modification in ns, an object's ETag."""


class ObjectWriter(Protocol):
    """An object that is being written."""

    def write(self, piece: bytes | memoryview) -> int:
        """Append `piece`; the caller may reuse its buffer at once."""

    def tell(self) -> int: ...


class ObjectReader(Protocol):
    """An object that is read once, from its beginning to its end."""

    def readinto(self, buffer: memoryview) -> int:
        """Fill `buffer`; return fewer bytes than it holds only at the object's end."""


class Storage(Protocol):
    """Objects below one root. Any method may raise TransientStorageError or StorageDenied."""

    @property
    def uri(self) -> str:
        """The root, without a slash at its end."""

    def below(self, folder: str) -> Storage:
        """The same storage rooted at `folder`, one or more levels deeper. Creates nothing."""

    def write(self, name: str) -> AbstractContextManager[ObjectWriter]:
        """Write an object of any size in bounded memory.

        The object appears at the end of the block, durable, and replaces one of the same name. If
        the block raises, nothing appears.
        """

    def put_new(self, name: str, content: bytes) -> None:
        """Create a small object; it and all earlier writes below this root are durable on return.

        Raises ObjectExists if the name is taken. The caller's own earlier attempt may have taken
        it: the response to a successful request can be lost.
        """

    def read(self, name: str) -> bytes:
        """The content of a small object. Raises ObjectMissing."""

    def open(self, name: str) -> AbstractContextManager[ObjectReader]:
        """Read an object of any size in bounded memory. Raises ObjectMissing."""

    def objects(self) -> dict[str, int]:
        """Size in bytes by name, of all objects at any depth. Empty if the root does not exist."""

    def listing(self, prefix: str = "") -> dict[str, ObjectFacts]:
        """Like `objects`, of the objects whose names begin with `prefix`, with their stamps."""

    def folders(self) -> list[str]:
        """Folders directly below the root, including those that hold only unfinished writes."""

    def delete(self, name: str) -> None:
        """Remove an object; does nothing if it does not exist."""

    def delete_broken(self) -> None:
        """Remove unfinished writes below the root. No writer may be active there."""

    def delete_all(self) -> None:
        """Remove everything below the root, unfinished writes included."""


def local_folder(uri: str) -> Path | None:
    """The local folder behind a storage's URI; None for a bucket."""
    parts = urlsplit(uri)
    if parts.scheme == "s3":
        return None
    return Path(unquote(parts.path) if parts.scheme else uri)


def uri_fault(uri: str) -> str | None:
    """The reason why `uri` cannot be a storage's root, or None if it can."""
    if any(character < " " or character == "\x7f" for character in unquote(uri)):
        return "it has a control character: remove it"
    if uri.startswith("/"):
        return None
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        return f"it is not a URI ({error}): write an absolute path, or s3://bucket/prefix"
    if parts.scheme not in ("file", "s3"):
        return "use an absolute path, file:///path or s3://bucket/prefix"
    if parts.query or parts.fragment:
        return "a query or fragment is not allowed: use letters, digits and ._- in names"
    return _bucket_fault(parts.netloc) if parts.scheme == "s3" else _file_fault(parts)


def _bucket_fault(bucket: str) -> str | None:
    if not bucket:
        return "it has no bucket: write s3://bucket/prefix"
    known = _BUCKET.fullmatch(bucket)
    return None if known else f"{bucket!r} is not a bucket's name: use a-z, 0-9, . and -"


def _file_fault(parts: SplitResult) -> str | None:
    if parts.netloc not in ("", "localhost"):
        return f"host {parts.netloc!r} is not supported: write file:///absolute/path"
    return None if parts.path.startswith("/") else "the path must be absolute: every node reads it"


def joined(uri: str, name: str) -> str:
    """The URI of an object or folder `name` below `uri`."""
    return f"{uri.rstrip('/')}/{name}"


def write_small(storage: Storage, name: str, content: bytes) -> None:
    """Write an object in one piece; replaces one of the same name."""
    with storage.write(name) as stream:
        stream.write(content)
