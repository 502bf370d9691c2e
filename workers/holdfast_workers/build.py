"""The build of Holdfast that this process runs: a digest of the code that its ranks would run.

The processes of one world exchange records that other code may lay out differently, so all of them
must have one build. An upgrade replaces the code on the disk of a node, but not in its processes.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

_LENGTH = 12


def on_disk() -> str:
    """The build that a process has which starts now; some 10 ms."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:_LENGTH]


LOADED = on_disk()
"""The build of this process."""


def is_replaced() -> bool:
    """Whether a program that this process starts now would have another build."""
    try:
        return on_disk() != LOADED
    except OSError:  # it is being replaced
        return True
