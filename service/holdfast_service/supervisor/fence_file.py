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
class Floor:
    epoch: int = 0
    attempt: int = 0


class FenceFile:
    def __init__(self, job_dir: Path) -> None:
        self._path = job_dir / "fence.json"
        self._written = Floor()

    def read(self) -> Floor:
        """What was written last; zero if nothing was."""
        try:
            return Floor(**json.loads(self._path.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return Floor()

    def is_passed(self, epoch: int) -> bool:
        """Whether a later supervisor has begun since: this one has nothing to say any more."""
        return self.read().epoch > epoch

    def write(self, epoch: int, attempt: int) -> None:
        """Announce; atomic. Does nothing if this was written last, or a later supervisor has begun
        since, which `is_passed` tells: its word must not be lost."""
        floor = Floor(epoch, attempt)
        if floor == self._written or self.is_passed(epoch):
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps({"epoch": epoch, "attempt": attempt}))
        partial.replace(self._path)
        self._written = floor
