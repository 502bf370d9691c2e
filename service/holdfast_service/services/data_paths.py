"""Checks at submission that a job's data exists on the server, with bounded work and time.

A user's pattern may match a whole file system, and a file system may hang. A search ends at the
first match, or after a number of entries; it runs in a few threads that no other call uses. A path
that was not searched to the end is not refused: the ranks check it, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path

from holdfast_service.daemon_threads import DaemonThreads
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.settings import Settings
from holdfast_workers.spec import SpecFault

BUNDLED_SOURCES = ("python-stdlib",)
_OF_TEXT = f"the path or glob of text files that every node can read, or {BUNDLED_SOURCES[0]!r}"
_OF_IMAGES = "a folder that every node can read, with a subfolder of images for each class"
MAX_ENTRIES = 20_000
"""Most folders and files that a search looks at: some 0.1 s."""
MAX_SEARCHES = 4
"""Searches at the same time."""


class DataPaths:
    """The checks of one service, each within `data_path_check_s`."""

    def __init__(self, settings: Settings) -> None:
        self._deadline_s = settings.data_path_check_s
        self._threads = DaemonThreads(MAX_SEARCHES, "data-path")

    async def find_fault(self, spec: JobSpec) -> SpecFault | None:
        source = spec.data.source
        if spec.function is not None or source in BUNDLED_SOURCES:
            return None
        images = spec.model.family == "vit"
        search = self._threads.submit(is_folder if images else may_exist, source)
        try:
            if await asyncio.wait_for(asyncio.wrap_future(search), self._deadline_s):
                return None
            why = "is not a folder" if images else "does not exist"
        except TimeoutError:
            if search.cancelled():  # not begun: the file systems of other paths hang
                return None
            why = f"cannot be read: its file system did not answer in {self._deadline_s:g} s"
        except OSError as error:
            why = f"cannot be read: {error.strerror}"
        return SpecFault(
            path="data.source",
            message=f"{source!r} {why}: give {_OF_IMAGES if images else _OF_TEXT}",
        )


def is_folder(source: str) -> bool:
    """Raises OSError if it cannot be read."""
    return bool(source) and Path(source).is_dir()


def may_exist(source: str, max_entries: int = MAX_ENTRIES) -> bool:
    """Whether the path exists, or the pattern (of `glob`, recursive) matches anything. True, too,
    if that is not known after `max_entries`. Raises OSError if the path itself cannot be read."""
    if not source or Path(source).exists():
        return bool(source)
    try:
        return _Search(max_entries).finds(Path(source).parts)
    except _Unknown:
        return True


class _Unknown(Exception):
    """The search has looked at as many entries as it may."""


class _Search:
    def __init__(self, max_entries: int) -> None:
        self._left = max_entries

    def finds(self, parts: tuple[str, ...]) -> bool:
        """Whether the parts of a pattern match anything. Raises _Unknown."""
        literal = next((n for n, part in enumerate(parts) if has_magic(part)), len(parts))
        ahead = [(Path(*parts[:literal]), parts[literal:])]  # folders, and what to find below them
        while ahead:
            folder, pattern = ahead.pop()
            self._count()
            if pattern in ((), ("**",)):
                # Unlike methods of Path, these are False for what this user may not look at.
                if os.path.isdir(folder) if pattern else os.path.exists(folder):  # noqa: PTH110, PTH112
                    return True
            elif pattern[0] == "**":
                inner = filter(os.path.isdir, self._entries(folder, "*"))
                ahead += [(path, pattern) for path in inner]
                ahead.append((folder, pattern[1:]))
            elif has_magic(pattern[0]):
                ahead += [(path, pattern[1:]) for path in self._entries(folder, pattern[0])]
            else:
                ahead.append((folder / pattern[0], pattern[1:]))
        return False

    def _entries(self, folder: Path, pattern: str) -> Iterator[Path]:
        """The entries whose name matches; hidden ones only if the pattern begins with a dot."""
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                self._count()
                hidden = entry.name.startswith(".") and not pattern.startswith(".")
                if not hidden and fnmatchcase(entry.name, pattern):
                    yield folder / entry.name

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise _Unknown
