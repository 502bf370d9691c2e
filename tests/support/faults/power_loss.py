"""Disk states after a power loss: everything that was synced, and any part of the rest.

`PowerRecorder` records states as `FolderRecorder` does, and also what the code syncs: the bytes of
a file by `fsync` of the file, the entries of a folder by `fsync` of the folder. After the loss,
each entry is as last synced or as it is now. So are the bytes of each file, which may also be
truncated.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.faults.crash_states import Files, FolderRecorder, Moment

Entries = dict[int, dict[str, int]]
"""Inode by name, by inode of the folder."""
Contents = dict[int, bytes]


@dataclass(frozen=True)
class Disk:
    """The contents of a disk now, and as of the last syncs."""

    root: int
    entries: Entries
    contents: Contents
    synced_entries: Entries
    synced_contents: Contents

    def after_power_loss(self, random_: random.Random) -> Files:
        """A random state that a power loss may leave."""
        found: Files = {}
        self._survivors(self.root, "", found, random_)
        return found

    def _survivors(self, folder: int, path: str, found: Files, random_: random.Random) -> None:
        now, synced = self.entries.get(folder, {}), self.synced_entries.get(folder, {})
        for name in sorted({*now, *synced}):
            inode = random_.choice((now.get(name), synced.get(name)))
            if inode is None:
                continue
            if inode in self.contents or inode in self.synced_contents:
                found[path + name] = self._content(inode, random_)
            else:
                self._survivors(inode, f"{path}{name}/", found, random_)

    def _content(self, inode: int, random_: random.Random) -> bytes:
        synced = self.synced_contents.get(inode, b"")
        now = self.contents.get(inode, synced)
        if now == synced:
            return now
        cut = now[: random_.randrange(len(now) + 1)]
        return random_.choice((synced, now, cut, cut + bytes(len(now) - len(cut))))


@dataclass
class PowerRecorder(FolderRecorder):
    """A `FolderRecorder` that also records which data is synced."""

    disks: list[Disk] = field(default_factory=list)
    """The disk at each recorded moment."""
    _entries: Entries = field(default_factory=dict)
    _contents: Contents = field(default_factory=dict)

    @contextmanager
    def watching_syncs(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            sync = os.fsync

            def recording_fsync(fd: int) -> None:
                sync(fd)
                self._synced(Path(f"/proc/self/fd/{fd}").resolve())
                self._keep(self.moments[-1].files, "fsync")

            patch.setattr(os, "fsync", recording_fsync)
            yield

    def _synced(self, path: Path) -> None:
        if path.is_dir():
            self._entries[path.stat().st_ino] = _entries_of(path)
        elif path.exists():
            self._contents[path.stat().st_ino] = path.read_bytes()

    def _keep(self, files: Files, line: str) -> None:
        super()._keep(files, line)
        folders = [self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())]
        plain = [path for path in self.folder.rglob("*") if path.is_file()]
        self.disks.append(
            Disk(
                self.folder.stat().st_ino,
                {path.stat().st_ino: _entries_of(path) for path in folders},
                {path.stat().st_ino: path.read_bytes() for path in plain},
                dict(self._entries),
                dict(self._contents),
            )
        )


def _entries_of(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


__all__ = ["Disk", "Moment", "PowerRecorder"]
