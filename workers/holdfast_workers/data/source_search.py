"""Looks whether a job's data exists on this machine, with bounded work.

A user's pattern may match a whole file system. A search ends at the first match, or after a number
of entries: a path that was not searched to the end may exist. Imports nothing but the standard
library: it also runs in short tasks on nodes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path

MAX_ENTRIES = 20_000
"""Most folders and files that a search looks at: some 0.1 s."""


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
