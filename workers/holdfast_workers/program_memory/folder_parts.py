"""Checkpoints that are folders of files, as parts of payloads: collected, and written back.

After a restore every rank has the union of all ranks' files. A file appears under its name only
when it is complete. Of files of the same name, that of the lowest rank counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from holdfast_workers.errors import WorkersError
from holdfast_workers.program_memory.payload import PayloadPart
from holdfast_workers.program_memory.payload_exchange import PayloadRange, Transfer

PIECE_BYTES = 32 << 20
"""Files are exchanged in pieces of this size."""
BATCH_BYTES = 256 << 20
"""Bytes that are received before they are written to files."""


class BadFolder(WorkersError):
    """The folder cannot be saved, or its files cannot be written."""


@dataclass(frozen=True)
class FilePiece:
    """`range` of a payload is the content of the file `name` from `start` on."""

    name: str
    start: int
    range: PayloadRange


def files_in(folder: Path) -> dict[str, Path]:
    """The regular files below `folder` by their relative names, in order. Raises BadFolder."""
    if not folder.is_dir():
        raise BadFolder(f"{folder} is not a folder: write the checkpoint before it is saved")
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths}


def read_into(path: Path, target: memoryview) -> None:
    """Read a file of the size of `target`. Raises BadFolder if it has changed."""
    at = 0
    with path.open("rb", buffering=0) as file:
        while at < target.nbytes:
            count = file.readinto(target[at : at + PIECE_BYTES])
            if not count:
                raise BadFolder(f"{path} became shorter while it was saved: save it when complete")
            at += count


def pieces_of(parts_by_owner: Mapping[int, Mapping[str, PayloadPart]]) -> list[FilePiece]:
    """The pieces of all files, in a fixed order."""
    pieces, seen = [], set()
    for owner in sorted(parts_by_owner):
        for name, part in parts_by_owner[owner].items():
            if name in seen:
                continue
            seen.add(name)
            for start in range(0, max(part.nbytes, 1), PIECE_BYTES):
                size = min(PIECE_BYTES, part.nbytes - start)
                pieces.append(
                    FilePiece(name, start, PayloadRange(owner, part.offset + start, size))
                )
    return pieces


def batches_of(transfers: Sequence[Transfer]) -> Iterator[list[Transfer]]:
    """`transfers` in groups of about BATCH_BYTES, in their order."""
    batch: list[Transfer] = []
    size = 0
    for transfer in transfers:
        batch.append(transfer)
        size += transfer.range.nbytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class FolderWriter:
    """Writes pieces of files to hidden files, which get their names in `finish`; `discard` removes
    what did not. Several ranks may write to the same folder.

    After the first error of the file system nothing more is written, and `finish` raises it.
    """

    def __init__(self, folder: Path, names: Sequence[str], rank: int, *, writes: bool) -> None:
        """`writes`: whether this rank does. Raises BadFolder for a name outside of `folder`."""
        self._folder = folder
        self._rank = rank
        for name in names:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise BadFolder(f"a checkpoint's file may not be written to {name}")
        self._names = list(dict.fromkeys(names)) if writes else []
        self._problem: OSError | None = None
        with self._keeping_the_first_problem():
            if writes:
                folder.mkdir(parents=True, exist_ok=True)
            for name in self._names:
                hidden = self._hidden(name)
                hidden.parent.mkdir(parents=True, exist_ok=True)
                hidden.write_bytes(b"")

    def write(self, piece: FilePiece, content: memoryview) -> None:
        if self._problem is not None:
            return
        with self._keeping_the_first_problem(), self._hidden(piece.name).open("r+b") as file:
            file.seek(piece.start)
            file.write(content)

    def finish(self) -> None:
        """Give the files their names. Raises BadFolder."""
        if self._problem is None:
            with self._keeping_the_first_problem():
                for name in self._names:
                    self._hidden(name).replace(self._folder / name)
        if self._problem is not None:
            raise BadFolder(
                f"a checkpoint cannot be written to {self._folder}: {self._problem}. Give its file "
                "system more room (for /dev/shm in a container: --shm-size)"
            ) from self._problem

    def discard(self) -> None:
        """Remove the hidden files that are left."""
        for name in self._names:
            with contextlib.suppress(OSError):
                self._hidden(name).unlink(missing_ok=True)

    @contextmanager
    def _keeping_the_first_problem(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._problem = error

    def _hidden(self, name: str) -> Path:
        path = self._folder / name
        return path.with_name(f".{path.name}.rank-{self._rank}.partial")
