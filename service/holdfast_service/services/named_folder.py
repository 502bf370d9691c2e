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
    Raises StorageDenied, also for more than a checkpoint has."""
    names: set[str] = set()
    until = time.monotonic() + LOOK_S
    folders = [folder]
    try:
        while folders:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    names.add(str(Path(entry.path).relative_to(folder)))
                    if len(names) > MOST_ENTRIES or time.monotonic() > until:
                        why = f"it has {len(names)} entries and more: name the folder of one "
                        raise StorageDenied(str(folder), f"{why}checkpoint")
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
    except (FileNotFoundError, NotADirectoryError):
        return names
    except OSError as error:
        raise StorageDenied(str(folder), error.strerror or str(error)) from error
    return names
