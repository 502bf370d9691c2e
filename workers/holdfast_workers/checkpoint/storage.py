"""Where remote checkpoints lie: named objects below a root, on a file system or in a bucket.

What everything above relies on: an object appears whole and durable, or not at all; one made with
`put_new` is never replaced; every wait ends. A checkpoint is a `Storage` rooted at its folder, and
its address is that root's URI: `/path/step-00000007.attempt-1`, `s3://bucket/prefix/step-...`.
Names are relative, with `/` between folders; there is no rename.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from holdfast_workers.errors import WorkersError


class StorageError(WorkersError):
    """A storage did not do what was asked. Says which one, what happened, what to do."""

    def __init__(self, uri: str, why: str) -> None:
        super().__init__(f"{uri}: {why}")
        self.uri = uri
        self.why = why


class StorageUnavailable(StorageError):
    """It may work later: a time-out, an error of the server, a full disk, a bucket that is gone."""


class StorageDenied(StorageError):
    """Credentials or permissions do not allow it; trying again does not help."""


class ObjectMissing(StorageError):
    """There is no such object."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri, "there is none")


class ObjectExists(StorageError):
    """There is one already, and it stays as it is."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri, "it exists already")


class ObjectWriter(Protocol):
    """An object in the making."""

    def write(self, piece: bytes | memoryview) -> int:
        """Append; the piece may be reused at once."""

    def tell(self) -> int: ...


class ObjectReader(Protocol):
    """An object, read once from its beginning to its end."""

    def readinto(self, buffer: memoryview) -> int:
        """Fill `buffer`; fewer bytes than it holds only at the object's end."""


class Storage(Protocol):
    """Objects below one root. Anything may raise StorageUnavailable or StorageDenied."""

    @property
    def uri(self) -> str:
        """The root, without a slash at its end."""

    def below(self, folder: str) -> Storage:
        """The same storage, rooted one or more folders deeper. Creates nothing."""

    def write(self, name: str) -> AbstractContextManager[ObjectWriter]:
        """Write an object of any size in bounded memory.

        It appears at the end of the block, durable, in place of one of the same name; if the
        block raises, nothing appears.
        """

    def put_new(self, name: str, content: bytes) -> None:
        """Make a small object, durable along with all that was written below this root before.

        Raises ObjectExists if there is one. That may be our own: an answer can be lost.
        """

    def read(self, name: str) -> bytes:
        """A small object. Raises ObjectMissing."""

    def open(self, name: str) -> AbstractContextManager[ObjectReader]:
        """Read an object of any size in bounded memory. Raises ObjectMissing."""

    def objects(self) -> dict[str, int]:
        """Size in bytes by name, of all objects at any depth. Empty if there is no such root."""

    def folders(self) -> list[str]:
        """Folders right below the root, also those that hold only what broken writes left."""

    def delete(self, name: str) -> None:
        """Remove an object; harmless where there is none."""

    def delete_broken(self) -> None:
        """Remove what broken writes left below the root. Nobody may be writing there."""

    def delete_all(self) -> None:
        """Remove everything below the root, and what broken writes left there."""


@dataclass(frozen=True)
class StorageOptions:
    """How to reach a bucket, and how long to try. A file system needs none of it."""

    endpoint: str | None = None
    """URL of an S3 service other than AWS's own."""
    region: str | None = None
    credentials: dict[str, str] | None = field(default=None, repr=False)
    """`access_key_id`, `secret_access_key`, perhaps `session_token`; None: AWS's usual places."""
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 20.0
    """Longest silence of the other side."""
    part_timeout_s: float = 120.0
    """For one part, however slowly it trickles."""
    attempts: int = 5
    patience_s: float = 60.0
    """From an operation's first attempt to the beginning of its last."""
    part_bytes: int = 16 * 1024 * 1024
    in_flight: int = 4
    """Parts on their way at a time; memory is this times their size, for each object."""

    def as_document(self) -> dict[str, Any]:
        """As JSON, for another process; bears the credentials."""
        return asdict(self)


def open_storage(uri: str, options: StorageOptions | None = None) -> Storage:
    """The storage rooted at `uri`: an absolute path, `file:///path` or `s3://bucket/prefix`.

    Nothing is connected to or created. Raises ValueError for any other URI.
    """
    fault = uri_fault(uri)
    if fault is not None:
        raise ValueError(f"{uri}: {fault}")
    parts = urlsplit(uri)
    if parts.scheme == "s3":
        # Late: only who uses a bucket pays for its client.
        from holdfast_workers.checkpoint.s3 import S3Storage

        return S3Storage.connect(parts.netloc, parts.path.strip("/"), options or StorageOptions())
    from holdfast_workers.checkpoint.local_files import LocalStorage

    folder = local_folder(uri)
    assert folder is not None  # only a bucket has none
    return LocalStorage(folder)


def local_folder(uri: str) -> Path | None:
    """The folder that a storage's root is; None if it is a bucket."""
    parts = urlsplit(uri)
    if parts.scheme == "s3":
        return None
    return Path(unquote(parts.path) if parts.scheme else uri)


def uri_fault(uri: str) -> str | None:
    """Why `uri` cannot be a storage's root, or None if it can."""
    if uri.startswith("/"):
        return None
    parts = urlsplit(uri)
    if parts.scheme not in ("file", "s3"):
        return "use an absolute path, file:///path or s3://bucket/prefix"
    if parts.query or parts.fragment:
        return "it has a query or a fragment: use letters, digits and ._- in names"
    if parts.scheme == "s3":
        return None if parts.netloc else "it names no bucket: write s3://bucket/prefix"
    if parts.netloc not in ("", "localhost"):
        return f"host {parts.netloc!r} is not supported: write file:///absolute/path"
    return None if parts.path.startswith("/") else "it must be absolute: every node reads it"


def joined(uri: str, name: str) -> str:
    """The address of an object or folder below `uri`."""
    return f"{uri.rstrip('/')}/{name}"


def write_small(storage: Storage, name: str, content: bytes) -> None:
    """Write an object in one piece, in place of one of the same name."""
    with storage.write(name) as stream:
        stream.write(content)
