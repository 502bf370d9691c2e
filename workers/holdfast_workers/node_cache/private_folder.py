"""Folders that only their owner may read and write, whatever the umask."""

from __future__ import annotations

from pathlib import Path


def make_private(folder: Path) -> None:
    """Make the folder, and each missing one above it. One that exists stays as it is: its owner may
    have opened it on purpose. Raises OSError."""
    for each in reversed((folder, *folder.parents)):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)
