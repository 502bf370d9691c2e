"""Full disks at the end of a program that failed: a fact that the text of its error may not tell.

torch reports a write that failed without its reason. The folders that a program is known to use are
looked at: its working folder, that of temporary files, shared memory, and those in its arguments.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from holdfast_workers.byte_sizes import size_of

FULL_BYTES = 1 << 20
"""Room below which a disk counts as full: what is left after a write that failed."""
LOOK_S = 1.0
"""How long a look may take: a file system whose server is gone answers never."""
_SHARED_MEMORY = "/dev/shm"


def places_of(arguments: Sequence[str]) -> list[str]:
    """The folders that a program with these arguments may write to."""
    named = [word.rpartition("=")[2] for word in arguments]
    absolute = [word for word in named if word.startswith("/")]
    return [".", tempfile.gettempdir(), _SHARED_MEMORY, *absolute]


def describe(
    places: Iterable[str], statvfs: Callable[[Path], os.statvfs_result] = os.statvfs
) -> str:
    """The file systems of these places that are full, as the end of a message; "" if none is."""
    found: dict[int, str] = {}

    def look() -> None:
        for place in places:
            with contextlib.suppress(OSError):
                folder = _existing(Path(place).absolute())
                state = statvfs(folder)
                free = (state.f_bfree if os.geteuid() == 0 else state.f_bavail) * state.f_frsize
                is_written = not state.f_flag & os.ST_RDONLY  # images have no free blocks
                if state.f_blocks and is_written and free < FULL_BYTES:
                    size = size_of(state.f_blocks * state.f_frsize)
                    text = f"the disk of {folder} is full: {size_of(free)} of {size} are free"
                    found.setdefault(folder.stat().st_dev, text)

    looking = threading.Thread(target=look, name="full-disks", daemon=True)
    looking.start()
    looking.join(LOOK_S)
    return "".join(f"; on the node {text}" for text in list(found.values()))


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next((each for each in (path, *path.parents) if each.exists()), Path("/"))
