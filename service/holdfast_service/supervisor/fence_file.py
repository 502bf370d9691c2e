"""Stores the highest epoch and attempt of a job in its folder, as a lower bound for successors.

Agents know both; the file matters when every agent died together with the supervisor. Both numbers
only ever grow (P1).
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
        """The last written values; zeros if nothing was written."""
        try:
            return FenceFloor(**json.loads(self._path.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return FenceFloor()

    def is_superseded(self, epoch: int) -> bool:
        """Whether a supervisor with a later epoch has started: this supervisor must halt."""
        return self.read().epoch > epoch

    def write(self, epoch: int, attempt: int) -> None:
        """Store both numbers atomically.

        Does nothing if they are stored already, or if a later supervisor has started
        (`is_superseded`): its entry must not be overwritten.
        """
        floor = FenceFloor(epoch, attempt)
        if floor == self._written or self.is_superseded(epoch):
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps({"epoch": epoch, "attempt": attempt}))
        partial.replace(self._path)
        self._written = floor
