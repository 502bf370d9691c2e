"""The newest rows and digests of a run, in the node's shared memory beside its memory checkpoints.

A state that is restored from memory brings the rows of its steps along: they survive the agent's
process, as the state does. Every node with ranks has the same rows. Entries are lines of JSON in
two files; when the newer file is full, it replaces the older one. A torn last line is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import structlog

from holdfast_workers.protocol import codec
from holdfast_workers.protocol.codec import UnreadableDocument
from holdfast_workers.protocol.messages import StepRow

FILE_BYTES = 4 << 20
"""A file that would become longer is full; rows grow with the world."""
NEWER, OLDER = "rows.newer", "rows.older"
_log = structlog.get_logger()

Entry = StepRow | tuple[int, str, int]
"""A row; or a step, its digest, and the attempt that computed it."""


class RowFile:
    """A file of rows, for one thread at a time. After an error of the file system it writes no
    more."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nbytes = 0
        self._usable = True

    def load(self) -> list[Entry]:
        """The entries of former incarnations, in their order."""
        found: list[Entry] = []
        for name in (OLDER, NEWER):
            found += _read(self._folder / name)
        self._nbytes = self._end_torn_line()
        return found

    def add(self, entry: Entry) -> None:
        """Append an entry."""
        if not self._usable:
            return
        try:
            line = _line(entry)
            if self._nbytes and self._nbytes + len(line) > FILE_BYTES:
                (self._folder / NEWER).replace(self._folder / OLDER)
                self._nbytes = 0
            with (self._folder / NEWER).open("a") as file:
                file.write(line)
            self._nbytes += len(line)
        except OSError as error:
            self._usable = False
            _log.warning("rows are no longer kept in shared memory", why=str(error))

    def _end_torn_line(self) -> int:
        """The length of the newer file, whose last line is complete from now on."""
        path = self._folder / NEWER
        try:
            written = path.read_bytes()
            if written and not written.endswith(b"\n"):
                with path.open("a") as file:
                    file.write("\n")
            return len(written) + 1
        except OSError:  # there is no file yet
            return 0


def _line(entry: Entry) -> str:
    value: Any = codec.as_json(entry) if isinstance(entry, StepRow) else entry
    return json.dumps(value, separators=(",", ":")) + "\n"


def _read(path: Path) -> Iterator[Entry]:
    try:
        lines: Iterable[str] = path.read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            value = json.loads(line)
            if isinstance(value, list):
                step, digest, attempt = value
                yield int(step), str(digest), int(attempt)
            else:
                yield codec.restore(StepRow, value)
        except (ValueError, TypeError, UnreadableDocument):  # torn, or of another version
            continue
