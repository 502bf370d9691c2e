"""The format of a remote checkpoint, and how checkpoints are listed, read and verified.

A checkpoint is a folder `<root>/step-<8 digits>.attempt-<n>/` of a storage, with one file per
rank, stock `.metadata` for other programs, and `manifest.json`. The manifest is written last, in
one piece, and never changes: a folder with a manifest is complete, a folder without one is not a
checkpoint yet. The manifest records the size and sha256 of every file, the place of every
tensor's bytes, and a digest of itself. A folder that holds the mark `why-bad.txt` is quarantined
and no longer listed.

A `checkpoint` argument is a `Storage` rooted at one checkpoint's folder; a `root` argument is
rooted at the folder that holds several.

Reading a checkpoint unpickles nothing and loads no torch, so programs that list and choose
checkpoints stay light. `publish` writes the manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast_workers.checkpoint.boxes import Box
from holdfast_workers.checkpoint.storage import (
    ObjectMissing,
    Storage,
    joined,
)
from holdfast_workers.errors import WorkersError

MANIFEST = "manifest.json"
QUARANTINED = "why-bad.txt"
REMOVING = "removing.mark"
FORMAT = "holdfast.checkpoint"
VERSION = 1
FOLDER_NAME = re.compile(r"step-(\d{8,})\.attempt-(\d+)")
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_HASH_CHUNK = 4 * 1024 * 1024
_LISTED = 5

OnRead = Callable[[int], None]
"""Receives the size of each piece after it was read; an exception of its ends the reading."""


class CheckpointError(WorkersError):
    """Base class of the errors of the remote tier."""


class BadCheckpoint(CheckpointError):
    """The stored bytes are not those that were saved. Names the file and the defect."""

    def __init__(self, uri: str, reason: str) -> None:
        super().__init__(f"{uri}: {reason}")
        self.uri = uri
        self.reason = reason


class IncompleteCheckpoint(CheckpointError):
    """A rank or a part of a tensor is missing or duplicated; nothing is published."""


class CheckpointExists(CheckpointError):
    """Another manifest has been published in this folder; manifests are never replaced."""


class IncompatibleCheckpoint(CheckpointError):
    """The checkpoint is whole, but of another model: a shape or dtype differs."""


@dataclass(frozen=True)
class SavedTensor:
    """One box of one tensor, and its place in a file."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    per_rank: bool
    rank: int
    file: str
    offset: int  # of the entry that stock programs read (a torch.save archive)
    length: int
    data_offset: int  # of the raw bytes, from the start of the file
    nbytes: int
    weight: bool = False  # as in the layout

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.shape)


@dataclass(frozen=True)
class SavedFile:
    name: str
    rank: int
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint. `digest` is the sha256 of the manifest's own content."""

    uri: str
    step: int
    attempt: int
    mesh: dict[str, int]
    byteorder: str
    files: tuple[SavedFile, ...]
    tensors: tuple[SavedTensor, ...]
    extra: dict[str, Any]
    digest: str

    @property
    def folder(self) -> str:
        """The name of the checkpoint's folder below the root."""
        return checkpoint_folder(self.step, self.attempt)

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the checkpoint's step that were known when the state was saved."""
        return dict(self.extra.get("metrics") or {})

    def file(self, name: str) -> SavedFile:
        return next(file for file in self.files if file.name == name)


def checkpoint_folder(step: int, attempt: int) -> str:
    """The name of the folder in which `attempt` publishes `step`."""
    return f"step-{step:08d}.attempt-{attempt}"


def read_manifest(checkpoint: Storage) -> Manifest:
    """The manifest, checked against its own digest. Raises ObjectMissing if the checkpoint is not
    complete, BadCheckpoint if the manifest is damaged."""
    uri = joined(checkpoint.uri, MANIFEST)
    try:
        document = json.loads(checkpoint.read(MANIFEST))
        content = {key: value for key, value in document.items() if key != "digest"}
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise BadCheckpoint(uri, f"format {content['format']} {content['version']}")
        if content_digest(content) != document["digest"]:
            raise BadCheckpoint(uri, "it does not match its own digest")
        return parse_manifest(checkpoint.uri, document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(uri, f"damaged: {type(error).__name__}: {error}") from error


def parse_manifest(uri: str, document: dict[str, Any]) -> Manifest:
    """The manifest that `document` describes. Raises BadCheckpoint if a part of it lies outside the
    checkpoint's folder or outside its file, or is no box; KeyError or TypeError if a field is
    missing."""
    files = tuple(SavedFile(**file) for file in document["files"])
    tensors = tuple(
        SavedTensor(
            **{
                **tensor,
                "global_shape": tuple(tensor["global_shape"]),
                "offsets": tuple(tensor["offsets"]),
                "shape": tuple(tensor["shape"]),
            }
        )
        for tensor in document["tensors"]
    )
    sizes = {file.name: file.nbytes for file in files}
    for file in files:
        # A manifest is untrusted input: a file name must not lead out of the folder.
        if _FILE_NAME.fullmatch(file.name) is None or file.name in (".", ".."):
            raise BadCheckpoint(joined(uri, MANIFEST), f"it names a file {file.name!r}")
    for tensor in tensors:
        if not _is_box(tensor):
            raise BadCheckpoint(joined(uri, MANIFEST), f"{tensor.name} has no shape and place")
        if not 0 <= tensor.data_offset <= sizes[tensor.file] - tensor.nbytes or tensor.nbytes < 0:
            raise BadCheckpoint(joined(uri, MANIFEST), f"{tensor.name} lies outside {tensor.file}")
    return Manifest(
        uri=uri,
        step=document["step"],
        attempt=document["attempt"],
        mesh=document["mesh"],
        byteorder=document["byteorder"],
        files=files,
        tensors=tensors,
        extra=document["extra"],
        digest=document["digest"],
    )


def _is_box(tensor: SavedTensor) -> bool:
    lengths = (tensor.global_shape, tensor.offsets, tensor.shape)
    same_dims = len({len(each) for each in lengths}) == 1
    return same_dims and all(isinstance(n, int) and n >= 0 for each in lengths for n in each)


def complete_manifest(checkpoint: Storage) -> Manifest:
    """Read the manifest like `read_manifest`, but raise BadCheckpoint also if it is missing."""
    try:
        return read_manifest(checkpoint)
    except ObjectMissing as error:
        raise BadCheckpoint(
            joined(checkpoint.uri, MANIFEST), "missing: the checkpoint is not complete"
        ) from error


def list_checkpoints(
    root: Storage, on_bad: Callable[[str, str], None] | None = None
) -> list[Manifest]:
    """The complete checkpoints below `root`, newest first (by step, then attempt).

    Complete means published; the files are not read, see `verify`. A folder whose manifest is
    damaged is left out and reported by `on_bad(uri, reason)`.
    """
    manifests = []
    names = root.objects()
    for folder in {name.partition("/")[0] for name in names}:
        if FOLDER_NAME.fullmatch(folder) is None or f"{folder}/{QUARANTINED}" in names:
            continue
        try:
            manifests.append(read_manifest(root.below(folder)))
        except ObjectMissing:
            continue  # not complete, or removed since the listing
        except BadCheckpoint as error:
            if on_bad is not None:
                on_bad(joined(root.uri, folder), str(error))
    return sorted(manifests, key=lambda manifest: (-manifest.step, -manifest.attempt))


def verify(checkpoint: Storage, on_read: OnRead = lambda _: None) -> None:
    """Read every byte. Raises BadCheckpoint naming the first file that is not as it was saved."""
    for file in complete_manifest(checkpoint).files:
        with VerifiedReader(checkpoint, file, on_read):
            pass  # the end of the block reads all


class VerifiedReader:
    """Reads a file once, in order and in bounded memory, and verifies it.

    The end of the `with` block reads the rest of the file and raises BadCheckpoint unless size and
    sha256 are as saved. Bytes taken from the file must not be used before that.
    """

    def __init__(
        self, checkpoint: Storage, file: SavedFile, on_read: OnRead = lambda _: None
    ) -> None:
        self._at = checkpoint
        self._file = file
        self._on_read = on_read
        self._position = 0
        self._sha256 = hashlib.sha256()
        self._stack = contextlib.ExitStack()
        self._buffer = memoryview(bytearray(min(_HASH_CHUNK, max(1, file.nbytes))))

    def __enter__(self) -> VerifiedReader:
        try:
            self._stream = self._stack.enter_context(self._at.open(self._file.name))
        except ObjectMissing as error:
            raise BadCheckpoint(self._uri, "missing") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._stack:
            if kind is None:
                self._check_end()

    def readinto(self, buffer: memoryview) -> None:
        """Fill `buffer` with the next bytes."""
        for start in range(0, len(buffer), _HASH_CHUNK):  # hashed while in the cache
            piece = buffer[start : start + _HASH_CHUNK]
            count = self._stream.readinto(piece)
            self._sha256.update(piece[:count])
            self._position += count
            self._on_read(count)
            if count < len(piece):
                self._wrong_size(self._position)

    def skip_to(self, position: int) -> None:
        if position < self._position:
            raise BadCheckpoint(self._uri, f"two tensors share the bytes at {position}")
        while self._position < position:
            self.readinto(self._buffer[: position - self._position])

    def _check_end(self) -> None:
        self.skip_to(self._file.nbytes)
        if self._stream.readinto(self._buffer[:1]):
            self._wrong_size(self._file.nbytes + 1)
        if self._sha256.hexdigest() != self._file.sha256:
            raise BadCheckpoint(self._uri, "its sha256 is not the manifest's")

    def _wrong_size(self, nbytes: int) -> None:
        size = f"{nbytes} bytes" if nbytes <= self._file.nbytes else "longer"
        raise BadCheckpoint(self._uri, f"{size}, the manifest says {self._file.nbytes}")

    @property
    def _uri(self) -> str:
        return joined(self._at.uri, self._file.name)


def content_digest(content: dict[str, Any]) -> str:
    """The sha256, in hex, of the JSON document in its canonical form."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def listed(names: Sequence[str]) -> str:
    """The first names, for a message."""
    more = f" and {len(names) - _LISTED} more" if names[_LISTED:] else ""
    return ", ".join(names[:_LISTED]) + more


def tensor_record(tensor: SavedTensor) -> dict[str, Any]:
    """The JSON of a tensor, as in a shard's record and in the manifest."""
    return asdict(tensor)
