"""A look into a folder that a user has named: it may be any folder of the server, so that the look
is bounded in number and in time."""

from __future__ import annotations

import os
import time
from pathlib import Path

from holdfast_workers.checkpoint.storage import StorageDenied

MOST_ENTRIES = 100_000
LOOK_S = 5.0


def names_within(folder: Path) -> set[str]:
    """The names of all entries at any depth, relative to the folder; none if it does not exist.
    Folders that vanish meanwhile are left out. Raises StorageDenied, also for more than a
    checkpoint has."""
    names: set[str] = set()
    until = time.monotonic() + LOOK_S
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    names.add(str(Path(entry.path).relative_to(folder)))
                    _refuse_too_much(folder, len(names), until)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise StorageDenied(str(folder), error.strerror or str(error)) from error
    return names


def _refuse_too_much(folder: Path, found: int, until: float) -> None:
    """Raises StorageDenied."""
    if found > MOST_ENTRIES:
        why = f"it has more than {MOST_ENTRIES} entries"
    elif time.monotonic() > until:
        why = f"to list it took more than {LOOK_S:g} s ({found} entries so far)"
    else:
        return
    raise StorageDenied(str(folder), f"{why}: name the folder of one checkpoint")
