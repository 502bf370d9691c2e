"""The file of a backup: a zip archive of rows, keys and a manifest.

| Member | Content |
|---|---|
| `tables/<name>.jsonl` | one JSON array per row, with the table's columns in the manifest |
| `keys/...` | the files of the folder of keys |
| `manifest.json` | the last member: versions, and a digest of every other member |

The file gets its name when it is complete and on disk; only its owner can read it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from holdfast_service.zip_files import UNREADABLE
from holdfast_workers.private_files import sync_folder

FORMAT = 1
MANIFEST = "manifest.json"
_LARGEST_MANIFEST = 64 << 20
_PIECE = 1 << 20


class BackupError(Exception):
    """A backup or a restore is not possible; the message says why, and what to do."""


class Contents(BaseModel):
    """A member of the archive."""

    model_config = ConfigDict(frozen=True)

    name: str
    nbytes: int
    sha256: str


class TableContents(Contents):
    """The rows of a table."""

    table: str
    columns: dict[str, str]
    """Name -> kind; see table_rows.py."""
    rows: int


class BackupManifest(BaseModel):
    """The description of a backup and of its content."""

    model_config = ConfigDict(frozen=True)

    format: int = FORMAT
    version: str
    """Version of the Holdfast that made the backup."""
    revision: str
    """Revision of the database's schema."""
    made_at: float
    database: str
    """The kind of database: "sqlite" or "postgresql"."""
    installation: str
    key_fingerprint: str | None
    newest_change: int
    """The largest change number; see store/change_numbers.py."""
    settings: dict[str, Any]
    """The server's settings that are no secrets."""
    tables: tuple[TableContents, ...]
    keys: tuple[Contents, ...]

    @property
    def members(self) -> tuple[Contents, ...]:
        return (*self.tables, *self.keys)

    def rows(self, table: str) -> int:
        return sum(each.rows for each in self.tables if each.table == table)


class ArchiveMember:
    """A member that is being written, or read: counts and digests its bytes."""

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self.name = name
        self.nbytes = 0
        self._file = file
        self._digest = hashlib.sha256()

    def write(self, piece: bytes) -> None:
        self._file.write(piece)
        self._count(piece)

    def pieces(self) -> Iterator[bytes]:
        while piece := self._file.read(_PIECE):
            self._count(piece)
            yield piece

    def contents(self) -> Contents:
        return Contents(name=self.name, nbytes=self.nbytes, sha256=self._digest.hexdigest())

    def _count(self, piece: bytes) -> None:
        self.nbytes += len(piece)
        self._digest.update(piece)


class BackupWriter:
    """Writes a backup beside its final name; leaves nothing behind unless `finish` is called."""

    def __init__(self, path: Path, *, replace: bool) -> None:
        """Raises BackupError if the file exists and is not to be replaced."""
        self._path, self._replace = path, replace
        if not path.parent.is_dir():
            raise BackupError(f"{path.parent} is not a folder: create it first")
        self._refuse_to_replace()
        self._fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(self._fresh, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(descriptor, "w+b")
        self._archive = zipfile.ZipFile(self._file, "w", zipfile.ZIP_DEFLATED)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError, ValueError):  # a full disk was reported already
            self._archive.close()
        self._file.close()
        self._fresh.unlink(missing_ok=True)

    @contextlib.contextmanager
    def member(self, name: str) -> Iterator[ArchiveMember]:
        with self._archive.open(name, "w", force_zip64=True) as file:
            yield ArchiveMember(name, file)

    def finish(self, manifest: BackupManifest) -> int:
        """Give the file its name, once it is on disk; returns its size. Raises BackupError."""
        self._archive.writestr(MANIFEST, manifest.model_dump_json(indent=1))
        self._archive.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._refuse_to_replace()
        self._fresh.replace(self._path)
        sync_folder(self._path.parent)
        return self._path.stat().st_size

    def _refuse_to_replace(self) -> None:
        if self._path.exists() and not self._replace:
            raise BackupError(f"{self._path} exists: give another name, or --force to replace it")


class BackupReader:
    """Reads a backup. Every method raises BackupError for a damaged file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except FileNotFoundError as error:
            raise BackupError(f"there is no file {path}") from error
        except UNREADABLE as error:
            raise self._damaged(error) from error
        try:
            self.manifest = self._read_manifest()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._archive.close()

    def verify(self) -> None:
        """Read all bytes, and compare them with the digests of the manifest."""
        known = [MANIFEST, *(member.name for member in self.manifest.members)]
        if sorted(self._archive.namelist()) != sorted(known):
            raise self._damaged("its members are not those of its manifest")
        for expected in self.manifest.members:
            with self.member(expected) as member:
                for _ in member.pieces():
                    pass

    def read(self, contents: Contents) -> bytes:
        """A whole member, verified."""
        with self.member(contents) as member:
            return b"".join(member.pieces())

    def lines(self, contents: Contents) -> Iterator[bytes]:
        """The lines of a member; their digest is compared after the last."""
        rest = b""
        with self.member(contents) as member:
            for piece in member.pieces():
                *whole, rest = (rest + piece).split(b"\n")
                yield from whole
        if rest:
            raise self._damaged(f"{contents.name} ends in the middle of a row")

    @contextlib.contextmanager
    def member(self, expected: Contents) -> Iterator[ArchiveMember]:
        """A member that is read to its end within the block, and compared with its digest then."""
        member = None
        try:
            with self._archive.open(expected.name) as file:
                member = ArchiveMember(expected.name, file)
                yield member
        except UNREADABLE as error:
            raise self._damaged(error) from error
        found = member.contents()
        if (found.nbytes, found.sha256) != (expected.nbytes, expected.sha256):
            raise self._damaged(f"{expected.name} has another digest than its manifest says")

    def _read_manifest(self) -> BackupManifest:
        try:
            if self._archive.getinfo(MANIFEST).file_size > _LARGEST_MANIFEST:
                raise self._damaged("its manifest is too large")
            text = self._archive.read(MANIFEST)
            document = json.loads(text)
            found = document["format"]
        except (*UNREADABLE, TypeError) as error:
            raise self._damaged(error) from error
        if found != FORMAT:
            raise BackupError(
                f"{self._path} has format {found}, made by Holdfast {document.get('version')}, and "
                f"this version reads format {FORMAT}: restore it with that version"
            )
        try:
            return BackupManifest.model_validate(document)
        except ValidationError as error:
            raise self._damaged("its manifest is incomplete") from error

    def _damaged(self, why: object) -> BackupError:
        return BackupError(
            f"{self._path} is no complete backup ({why}): use another copy; nothing was changed"
        )
