"""The files that exports make: one per claim of an operation, below the data directory.

A file is named by the token of its claim, so that a server that lost its claim never writes into
the file of another. Files without a living claim, or whose operation is removed, are deleted.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from holdfast_service.errors import ContentGone, StorageUnavailable
from holdfast_service.views.operations import ContentView
from holdfast_workers.checkpoint import export, manifest
from holdfast_workers.checkpoint.storage import Storage
from holdfast_workers.private_files import sync_folder

_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Content:
    """A complete, verified file; its receiver closes it."""

    file: IO[bytes]
    view: ContentView


class ExportFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, token: str, view: ContentView) -> Content:
        """Raises ContentGone."""
        try:
            return Content(self._path(token).open("rb"), view)
        except OSError as error:
            raise ContentGone(
                f"{view.name} is not below {self._folder} of this server ({error.strerror}): "
                "export the checkpoint again"
            ) from error

    def exists(self, token: str) -> bool:
        return self._path(token).exists()

    def write(
        self,
        storage: Storage,
        token: str,
        *,
        hugging_face: bool,
        on_total: Callable[[int], None],
        on_read: Callable[[int], None],
    ) -> ContentView:
        """Write the model's parameters. Raises NotExportable, BadCheckpoint, StorageError,
        StorageUnavailable if the disk refuses the file."""
        read = manifest.read_manifest(storage)
        plan = export.plan_export(read, hugging_face=hugging_face)
        on_total(export.bytes_to_read(read))
        path = self._path(token)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with path.open("w+b") as file:
                export.write_export(storage, plan, file, on_read)
                os.fsync(file.fileno())  # the operation's row will say that it is whole
            sync_folder(self._folder)
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise StorageUnavailable(
                    f"cannot write the {plan.nbytes} bytes of the export to {self._folder}: "
                    f"{error.strerror}"
                ) from error
            raise
        return ContentView(
            name=f"step-{read.step:08d}{_SUFFIX}",
            nbytes=plan.nbytes,
            digest=hashlib.sha256(read.digest.encode() + plan.header).hexdigest(),
        )

    def tokens(self) -> set[str]:
        """Those of all files, also of files that are being written."""
        return {path.stem for path in self._folder.glob(f"*{_SUFFIX}")}

    def remove(self, tokens: Iterable[str]) -> None:
        for token in tokens:
            self._path(token).unlink(missing_ok=True)

    def _path(self, token: str) -> Path:
        return self._folder / f"{token}{_SUFFIX}"
