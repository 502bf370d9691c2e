"""What a remote checkpoint consists of, and the moment from which it counts.

A checkpoint is a folder `<root>/step-<8 digits>.attempt-<n>/` with one file per rank, stock
`.metadata` for other programs, and `manifest.json`. The manifest is written last, at once, and
never again: a folder with one is complete, a folder without one is nothing yet. It carries the
size and sha256 of every file and the place of every tensor's bytes, and a digest of itself.

Reading a checkpoint unpickles nothing. This module loads torch only while it publishes, for the
sake of `.metadata`; those who list and choose checkpoints stay light.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast_workers.checkpoint.boxes import Box, tiling_fault
from holdfast_workers.errors import WorkersError

MANIFEST = "manifest.json"
FORMAT = "holdfast.checkpoint"
VERSION = 1
FOLDER_NAME = re.compile(r"step-(\d{8,})\.attempt-(\d+)")
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_HASH_CHUNK = 4 * 1024 * 1024


class CheckpointError(WorkersError):
    """Something about the remote tier."""


class BadCheckpoint(CheckpointError):
    """What lies there is not what was saved. Names the file and what is wrong with it."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
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

    folder: Path
    step: int
    attempt: int
    mesh: dict[str, int]
    byteorder: str
    files: tuple[SavedFile, ...]
    tensors: tuple[SavedTensor, ...]
    extra: dict[str, Any]
    digest: str

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    def file(self, name: str) -> SavedFile:
        return next(file for file in self.files if file.name == name)


def checkpoint_folder(root: Path, step: int, attempt: int) -> Path:
    """Where the checkpoint of `step`, published by `attempt`, lies under `root`."""
    return root / f"step-{step:08d}.attempt-{attempt}"


def finalize(
    folder: Path, records: list[dict[str, Any]], mesh: dict[str, int], extra: dict[str, Any]
) -> Manifest:
    """Publish what every rank's `save_shard` has recorded; durable on return.

    To repeat it with the same records is harmless. Raises IncompleteCheckpoint if a rank is
    missing or the boxes of a tensor do not tile it, BadCheckpoint if a file is not as recorded,
    CheckpointExists if something else has been published here.
    """
    step, attempt = _agreed(folder, records, mesh)
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
    manifest = _parse(folder, {**content, "digest": _digest(content)})
    _check_tiling(manifest)
    for file in manifest.files:
        _check_size(folder, file)
    if (folder / MANIFEST).exists():
        return _same_as_published(folder, manifest)
    # torch is wanted here alone, see the module.
    from holdfast_workers.checkpoint.stock import write_stock_metadata

    write_stock_metadata(manifest)
    publish(folder, json.dumps({**content, "digest": manifest.digest}).encode())
    return _same_as_published(folder, manifest)


def read_manifest(folder: Path) -> Manifest:
    """The manifest, found whole. Raises FileNotFoundError if the checkpoint is not complete,
    BadCheckpoint if the manifest is damaged."""
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_bytes())
        content = {key: value for key, value in document.items() if key != "digest"}
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise BadCheckpoint(path, f"format {content['format']} {content['version']}")
        if _digest(content) != document["digest"]:
            raise BadCheckpoint(path, "it does not match its own digest")
        return _parse(folder, document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(path, f"damaged: {type(error).__name__}: {error}") from error


def list_checkpoints(
    root: Path, on_bad: Callable[[Path, str], None] | None = None
) -> list[Manifest]:
    """The complete checkpoints under `root`, newest first (by step, then attempt).

    Complete means published; the files are not read, see `verify`. A folder whose manifest is
    damaged is left out, and told to `on_bad(folder, why)`.
    """
    found = []
    for folder in root.iterdir() if root.is_dir() else ():
        if FOLDER_NAME.fullmatch(folder.name) is None:
            continue
        try:
            found.append(read_manifest(folder))
        except (FileNotFoundError, NotADirectoryError):
            continue  # not complete, or removed just now
        except BadCheckpoint as error:
            if on_bad is not None:
                on_bad(folder, str(error))
    return sorted(found, key=lambda manifest: (-manifest.step, -manifest.attempt))


def verify(folder: Path) -> None:
    """Read every byte. Raises BadCheckpoint naming the first file that is not as it was saved."""
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError as error:
        raise BadCheckpoint(folder / MANIFEST, "there is none: not complete") from error
    for file in manifest.files:
        verify_file(folder, file)


def verify_file(folder: Path, file: SavedFile) -> None:
    """Raises BadCheckpoint unless the file has the size and sha256 of the manifest."""
    _check_size(folder, file)
    hasher = hashlib.sha256()
    buffer = memoryview(bytearray(min(_HASH_CHUNK, max(1, file.nbytes))))
    with (folder / file.name).open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            hasher.update(buffer[:count])
    if hasher.hexdigest() != file.sha256:
        raise BadCheckpoint(folder / file.name, "its sha256 is not the manifest's")


def publish(folder: Path, document: bytes) -> None:
    """Make the manifest of a checkpoint appear whole and durable, or not at all.

    Never in place of another: the first one stays, and `finalize` finds out whose it is.
    """
    partial = folder / f".{MANIFEST}.{os.getpid()}.tmp"
    with partial.open("wb") as stream:
        stream.write(document)
        stream.flush()
        os.fsync(stream.fileno())
    fsync_folder(folder)  # the shards' names must not be less durable than the manifest's
    try:
        (folder / MANIFEST).hardlink_to(partial)  # unlike a rename, fails where one exists
    except FileExistsError:
        pass  # the caller compares with what was published
    finally:
        partial.unlink()
    fsync_folder(folder)
    fsync_folder(folder.parent)


def fsync_folder(folder: Path) -> None:
    """Make the folder's entries durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _agreed(folder: Path, records: list[dict[str, Any]], mesh: dict[str, int]) -> tuple[int, int]:
    """Step and attempt of the records, once they are one whole world's and of this folder."""
    ranks = sorted(record["rank"] for record in records)
    world_size = math.prod(mesh.values())
    if ranks != list(range(world_size)):
        raise IncompleteCheckpoint(f"{folder}: {world_size} ranks are wanted, there are {ranks}")
    states = {(record["step"], record["attempt"]) for record in records}
    if len(states) != 1:
        raise IncompleteCheckpoint(f"{folder}: shards of several states: {sorted(states)}")
    step, attempt = states.pop()
    if folder != checkpoint_folder(folder.parent, step, attempt):
        raise IncompleteCheckpoint(f"{folder} cannot hold step {step} of attempt {attempt}")
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
            raise IncompleteCheckpoint(f"{manifest.folder}: {name}: {fault}")


def _check_size(folder: Path, file: SavedFile) -> None:
    path = folder / file.name
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise BadCheckpoint(path, "missing") from error
    if size != file.nbytes:
        raise BadCheckpoint(path, f"{size} bytes, the manifest says {file.nbytes}")


def _same_as_published(folder: Path, manifest: Manifest) -> Manifest:
    published = read_manifest(folder)
    if published.digest != manifest.digest:
        raise CheckpointExists(f"{folder} holds another manifest: {published.digest}")
    return published


def _parse(folder: Path, document: dict[str, Any]) -> Manifest:
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
            raise BadCheckpoint(folder / MANIFEST, f"it names a file {file.name!r}")
    for tensor in tensors:
        if not 0 <= tensor.data_offset <= sizes[tensor.file] - tensor.nbytes:
            raise BadCheckpoint(folder / MANIFEST, f"{tensor.name} lies outside {tensor.file}")
    return Manifest(
        folder=folder,
        step=document["step"],
        attempt=document["attempt"],
        mesh=document["mesh"],
        byteorder=document["byteorder"],
        files=files,
        tensors=tensors,
        extra=document["extra"],
        digest=document["digest"],
    )


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def tensor_record(tensor: SavedTensor) -> dict[str, Any]:
    """A tensor as it stands in a shard's record and in the manifest."""
    return asdict(tensor)
