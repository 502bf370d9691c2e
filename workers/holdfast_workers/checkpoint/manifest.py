"""What a remote checkpoint consists of, and the moment from which it counts.

A checkpoint is a folder `<root>/step-<8 digits>.attempt-<n>/` of a storage, with one file per
rank, stock `.metadata` for other programs, and `manifest.json`. The manifest is written last, at
once, and never again: a folder with one is complete, a folder without one is nothing yet. It
carries the size and sha256 of every file and the place of every tensor's bytes, and a digest of
itself. A folder that holds the mark `why-bad.txt` is in quarantine: it is not listed any more.

The functions here take a `Storage` rooted at the checkpoint's folder, or at the root of several.

Reading a checkpoint unpickles nothing. This module loads torch only while it publishes, for the
sake of `.metadata`; those who list and choose checkpoints stay light.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from holdfast_workers.checkpoint.boxes import Box, tiling_fault
from holdfast_workers.checkpoint.storage import (
    ObjectExists,
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


class CheckpointError(WorkersError):
    """Something about the remote tier."""


class BadCheckpoint(CheckpointError):
    """What lies there is not what was saved. Names the file and what is wrong with it."""

    def __init__(self, uri: str, why: str) -> None:
        super().__init__(f"{uri}: {why}")
        self.uri = uri
        self.why = why


class IncompleteCheckpoint(CheckpointError):
    """A rank, or a part of a tensor, is missing or there twice: nothing is published."""


class CheckpointExists(CheckpointError):
    """Another manifest has been published in this folder; manifests are never replaced."""


class IncompatibleCheckpoint(CheckpointError):
    """The checkpoint is whole but not of this model: a shape or dtype differs."""


@dataclass(frozen=True)
class SavedTensor:
    """One box of one tensor, and where it lies."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    per_rank: bool
    rank: int
    file: str
    offset: int  # of the entry as stock programs read it (a torch.save archive)
    length: int
    data_offset: int  # of the bare bytes within the file
    nbytes: int

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
        """Its name under the root."""
        return checkpoint_folder(self.step, self.attempt)

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def metrics(self) -> dict[str, float]:
        """What the row of its step said, as far as it was known when the state was saved."""
        return dict(self.extra.get("metrics") or {})

    def file(self, name: str) -> SavedFile:
        return next(file for file in self.files if file.name == name)


def checkpoint_folder(step: int, attempt: int) -> str:
    """The name of the folder of `step`, as published by `attempt`."""
    return f"step-{step:08d}.attempt-{attempt}"


def finalize(
    at: Storage, records: list[dict[str, Any]], mesh: dict[str, int], extra: dict[str, Any]
) -> Manifest:
    """Publish what every rank's `save_shard` has recorded; durable on return.

    To repeat it with the same records is harmless. Raises IncompleteCheckpoint if a rank is
    missing or the boxes of a tensor do not tile it, BadCheckpoint if a file is not as recorded or
    the folder is being removed, CheckpointExists if something else has been published here.
    """
    step, attempt = _agreed(at.uri, records, mesh)
    records = sorted(records, key=lambda record: int(record["rank"]))
    content = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "attempt": attempt,
        "mesh": mesh,
        "byteorder": sys.byteorder,
        "files": [
            {key: record[key] for key in ("name", "rank", "nbytes", "sha256")} for record in records
        ],
        "tensors": [tensor for record in records for tensor in record["tensors"]],
        "extra": extra,
    }
    manifest = _parse(at.uri, {**content, "digest": content_digest(content)})
    _check_tiling(manifest)
    sizes = at.objects()
    for file in manifest.files:
        _check_size(at, file, sizes.get(file.name))
    if MANIFEST in sizes:
        return _same_as_published(at, manifest)
    # torch is wanted here alone, see the module.
    from holdfast_workers.checkpoint.stock import write_stock_metadata

    write_stock_metadata(at, manifest)
    with contextlib.suppress(ObjectExists):  # found out below whose it is
        at.put_new(MANIFEST, json.dumps({**content, "digest": manifest.digest}).encode())
    _require_untouched(at, manifest)
    return _same_as_published(at, manifest)


def read_manifest(at: Storage) -> Manifest:
    """The manifest, found whole. Raises ObjectMissing if the checkpoint is not complete,
    BadCheckpoint if the manifest is damaged."""
    uri = joined(at.uri, MANIFEST)
    try:
        document = json.loads(at.read(MANIFEST))
        content = {key: value for key, value in document.items() if key != "digest"}
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise BadCheckpoint(uri, f"format {content['format']} {content['version']}")
        if content_digest(content) != document["digest"]:
            raise BadCheckpoint(uri, "it does not match its own digest")
        return _parse(at.uri, document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(uri, f"damaged: {type(error).__name__}: {error}") from error


def complete_manifest(at: Storage) -> Manifest:
    """As `read_manifest`; that there is none is BadCheckpoint too."""
    try:
        return read_manifest(at)
    except ObjectMissing as error:
        raise BadCheckpoint(joined(at.uri, MANIFEST), "there is none: not complete") from error


def list_checkpoints(
    root: Storage, on_bad: Callable[[str, str], None] | None = None
) -> list[Manifest]:
    """The complete checkpoints under `root`, newest first (by step, then attempt).

    Complete means published; the files are not read, see `verify`. A folder whose manifest is
    damaged is left out, and told to `on_bad(uri, why)`.
    """
    found = []
    names = root.objects()
    for folder in {name.partition("/")[0] for name in names}:
        if FOLDER_NAME.fullmatch(folder) is None or f"{folder}/{QUARANTINED}" in names:
            continue
        try:
            found.append(read_manifest(root.below(folder)))
        except ObjectMissing:
            continue  # not complete, or removed just now
        except BadCheckpoint as error:
            if on_bad is not None:
                on_bad(joined(root.uri, folder), str(error))
    return sorted(found, key=lambda manifest: (-manifest.step, -manifest.attempt))


def verify(at: Storage, on_read: Callable[[int], None] = lambda _: None) -> None:
    """Read every byte. Raises BadCheckpoint naming the first file that is not as it was saved.

    `on_read` is told of each piece's bytes as they have been read; what it raises ends it all.
    """
    for file in complete_manifest(at).files:
        with VerifiedReader(at, file) as stream:
            for start in range(0, file.nbytes, _HASH_CHUNK):
                end = min(start + _HASH_CHUNK, file.nbytes)
                stream.skip_to(end)
                on_read(end - start)


class VerifiedReader:
    """A file read once, in order and in bounded memory. At the end of the `with` block it has
    been read to its end, and is found to be as it was saved, or BadCheckpoint is raised: what was
    taken of it is to be used only then."""

    def __init__(self, at: Storage, file: SavedFile) -> None:
        self._at = at
        self._file = file
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
        """Fill `buffer` with what follows."""
        for start in range(0, len(buffer), _HASH_CHUNK):  # hashed while the cache still has it
            piece = buffer[start : start + _HASH_CHUNK]
            count = self._stream.readinto(piece)
            self._sha256.update(piece[:count])
            self._position += count
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

    def _wrong_size(self, found: int) -> None:
        told = f"{found} bytes" if found <= self._file.nbytes else "longer"
        raise BadCheckpoint(self._uri, f"{told}, the manifest says {self._file.nbytes}")

    @property
    def _uri(self) -> str:
        return joined(self._at.uri, self._file.name)


def _agreed(uri: str, records: list[dict[str, Any]], mesh: dict[str, int]) -> tuple[int, int]:
    """Step and attempt of the records, once they are one whole world's and of this folder."""
    ranks = sorted(record["rank"] for record in records)
    world_size = math.prod(mesh.values())
    if ranks != list(range(world_size)):
        raise IncompleteCheckpoint(f"{uri}: {world_size} ranks are wanted, there are {ranks}")
    states = {(record["step"], record["attempt"]) for record in records}
    if len(states) != 1:
        raise IncompleteCheckpoint(f"{uri}: shards of several states: {sorted(states)}")
    step, attempt = states.pop()
    if uri.rpartition("/")[2] != checkpoint_folder(step, attempt):
        raise IncompleteCheckpoint(f"{uri} cannot hold step {step} of attempt {attempt}")
    return step, attempt


def _check_tiling(manifest: Manifest) -> None:
    boxes: dict[str, list[SavedTensor]] = defaultdict(list)
    for tensor in manifest.tensors:
        if not tensor.per_rank:
            boxes[tensor.name].append(tensor)
    for name, parts in boxes.items():
        kinds = {(part.dtype, part.global_shape) for part in parts}
        if len(kinds) != 1:
            raise IncompleteCheckpoint(f"{name}: ranks differ in dtype or shape: {sorted(kinds)}")
        fault = tiling_fault((part.box for part in parts), parts[0].global_shape)
        if fault is not None:
            raise IncompleteCheckpoint(f"{manifest.uri}: {name}: {fault}")


def _check_size(at: Storage, file: SavedFile, size: int | None) -> None:
    uri = joined(at.uri, file.name)
    if size is None:
        raise BadCheckpoint(uri, "missing")
    if size != file.nbytes:
        raise BadCheckpoint(uri, f"{size} bytes, the manifest says {file.nbytes}")


def _require_untouched(at: Storage, manifest: Manifest) -> None:
    """A removal that began before the manifest was there has not seen it: take it back. Each side
    writes down what it is about to do before it looks for the other."""
    sizes = at.objects()
    try:
        if REMOVING in sizes:
            raise BadCheckpoint(joined(at.uri, REMOVING), "it is being removed")
        for file in manifest.files:
            _check_size(at, file, sizes.get(file.name))
    except BadCheckpoint:
        at.delete(MANIFEST)
        raise


def _same_as_published(at: Storage, manifest: Manifest) -> Manifest:
    published = read_manifest(at)
    if published.digest != manifest.digest:
        raise CheckpointExists(f"{at.uri} holds another manifest: {published.digest}")
    return published


def _parse(uri: str, document: dict[str, Any]) -> Manifest:
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
        # A manifest is data from elsewhere: it must not lead out of its folder.
        if _FILE_NAME.fullmatch(file.name) is None or file.name in (".", ".."):
            raise BadCheckpoint(joined(uri, MANIFEST), f"it names a file {file.name!r}")
    for tensor in tensors:
        if not 0 <= tensor.data_offset <= sizes[tensor.file] - tensor.nbytes:
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


def content_digest(content: dict[str, Any]) -> str:
    """sha256, in hex, of what the JSON document says."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def tensor_record(tensor: SavedTensor) -> dict[str, Any]:
    """A tensor as it stands in a shard's record and in the manifest."""
    return asdict(tensor)
