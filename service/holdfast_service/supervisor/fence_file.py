"""The highest epoch and attempt of a job, in its folder: a floor under what the agents remember.

Agents know both; the file matters when every agent died together with the supervisor, so that
numbers still only grow (P1).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FenceFloor:
    epoch: int = 0
    attempt: int = 0


class FenceFile:
    def __init__(self, job_dir: Path) -> None:
        self._path = job_dir / "fence.json"
        self._written = FenceFloor()

    def read(self) -> FenceFloor:
        """What was written last; zero if nothing was."""
        try:
            return FenceFloor(**json.loads(self._path.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return FenceFloor()

    def is_superseded(self, epoch: int) -> bool:
        """Whether a later supervisor has begun since: this one has nothing to say any more."""
        return self.read().epoch > epoch

    def write(self, epoch: int, attempt: int) -> None:
        """Announce; atomic. Does nothing if this was written last, or a later supervisor has begun
        since, which `is_superseded` tells: its word must not be lost."""
        floor = FenceFloor(epoch, attempt)
        if floor == self._written or self.is_superseded(epoch):
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps({"epoch": epoch, "attempt": attempt}))
        partial.replace(self._path)
        self._written = floor
