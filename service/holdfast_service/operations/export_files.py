"""The files that exports make: one per claim of an operation, below the data directory.

Together the files take at most half of the disk space that they and nothing else use or could use:
database and keys may be on the same disk. A new one takes the place of the oldest ones that are
finished; an export whose file is gone can be requested again.

A file is named by the token of its claim, so that a server that lost its claim never writes into
the file of another. It is locked while it is being written. Files without a living claim, or whose
operation is removed, are deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from holdfast_service.errors import ContentGone, StorageUnavailable
from holdfast_service.views.operations import ContentView
from holdfast_workers.checkpoint import export
from holdfast_workers.checkpoint.manifest import Manifest
from holdfast_workers.checkpoint.storage import Storage
from holdfast_workers.private_files import sync_folder
from holdfast_workers.published.export_folder import plan_folder
from holdfast_workers.published.folder_parts import OpenStorage, read_parts

SHARE = 2
"""One of so many bytes of the disk is for exports."""
_BESIDE = re.compile(r"/(tokens|weights)/[0-9a-f]{32}")
_SUFFIX = ".safetensors"
"""Of every file here, whatever it has inside."""


@dataclass(frozen=True)
class Content:
    """A complete, verified file; its receiver closes it."""

    file: IO[bytes]
    view: ContentView


def is_beside(uri: str, spec: Mapping[str, Any], data_dir: Path) -> bool:
    """Whether `uri` is of a token set, or of published weights, in the store of a job with this
    resolved spec: an export reads no other folder, whatever its checkpoint says."""
    root = spec["checkpoint"]["remote"].get("uri") or str(data_dir.absolute())
    folder = uri.removeprefix(root.rstrip("/"))
    return folder != uri and _BESIDE.fullmatch(folder) is not None


class ExportFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._taking_room = threading.Lock()

    def open(self, token: str, view: ContentView) -> Content:
        """Raises ContentGone."""
        try:
            return Content(self._path(token).open("rb"), view)
        except OSError as error:
            raise ContentGone(
                f"{view.name} is not on this server ({error.strerror}): another server made it, or "
                "a later export took its place; export the checkpoint again"
            ) from error

    def exists(self, token: str) -> bool:
        return self._path(token).exists()

    def write(
        self,
        storage: Storage,
        token: str,
        *,
        open_beside: OpenStorage | None,
        averages: bool = False,
        on_total: Callable[[int], None],
        on_read: Callable[[int], None],
    ) -> ContentView:
        """Write the model's parameters, or with `averages` their moving averages; with
        `open_beside`, as a folder of Hugging Face, with files from the job's store. Raises
        NotExportable, BadCheckpoint, StorageError, StorageUnavailable if the disk refuses the
        file."""

        def as_folder(manifest: Manifest) -> export.ExportPlan:
            assert open_beside is not None
            return plan_folder(manifest, read_parts(manifest, open_beside))

        read, plan = export.read_plan(
            storage, None if open_beside is None else as_folder, averages=averages
        )
        on_total(export.bytes_to_read(read))
        path = self._path(token)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with path.open("w+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                self._take_room(path, plan.room_bytes)
                export.write_export(storage, plan, file, on_read)
                os.fsync(file.fileno())  # the operation's row will say that it is whole
            sync_folder(self._folder)
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise StorageUnavailable(
                    f"the server cannot write the {plan.room_bytes} bytes of the export: "
                    f"{error.strerror}; free space on the disk of its data directory"
                ) from error
            raise
        digest = hashlib.sha256(read.digest.encode())
        for _, content in plan.fixed:
            digest.update(content)
        return ContentView(
            name=f"step-{read.step:08d}{plan.suffix}",
            nbytes=plan.nbytes,
            digest=digest.hexdigest(),
            note=plan.note or None,
        )

    def tokens(self) -> set[str]:
        """The tokens of all files, also of files that are being written."""
        return {path.stem for path in self._folder.glob(f"*{_SUFFIX}")}

    def remove(self, tokens: Iterable[str]) -> None:
        for token in tokens:
            self._path(token).unlink(missing_ok=True)

    def _take_room(self, path: Path, nbytes: int) -> None:
        """Give the new file its size. Raises StorageUnavailable if it cannot have it."""
        with self._taking_room:
            disk, others = os.statvfs(self._folder), self._others(path)
            used = sum(status.st_blocks * 512 for _, status in others)
            allowed = (disk.f_bavail * disk.f_frsize + used) // SHARE
            wanted = nbytes + sum(status.st_size for _, status in others)
            # One without a size was opened just now, and may not be locked yet.
            for other, status in others:
                if wanted > allowed >= nbytes and status.st_size and _remove_finished(other):
                    wanted -= status.st_size
            if wanted > allowed:
                raise StorageUnavailable(
                    f"the export needs {nbytes} bytes; exports may take {allowed} bytes of the "
                    f"server's disk, and others that are not finished have {wanted - nbytes}: try "
                    "again later, or have the operator free space on the disk of the data directory"
                )
            os.truncate(path, nbytes)

    def _others(self, path: Path) -> list[tuple[Path, os.stat_result]]:
        """All other files, the oldest first."""
        found = []
        for other in self._folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                if other != path:
                    found.append((other, other.stat()))
        return sorted(found, key=lambda each: each[1].st_mtime_ns)

    def _path(self, token: str) -> Path:
        return self._folder / f"{token}{_SUFFIX}"


def _remove_finished(path: Path) -> bool:
    """Whether the file is removed; a file that is being written stays, also another server's."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        path.unlink()
    return True
