"""Reported checkpoints in the memory of the nodes: saved with each report, taken at a restart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class TakenCheckpoint:
    """The merged parts of all ranks, of the report `index`, in a folder of this node."""

    index: int
    path: Path


class MemoryCheckpoints(Protocol):
    """Each call is made by all ranks at once."""

    def save(self, index: int, part: Path | None) -> None:
        """Save a rank's part, a folder; None: it has none."""

    def take(self, stored: int) -> TakenCheckpoint | None:
        """The state that memory has, if that is not older than the report `stored`."""


class NoMemory:
    """Without memory checkpoints: the run's folder alone is used."""

    def save(self, index: int, part: Path | None) -> None:
        pass

    def take(self, stored: int) -> TakenCheckpoint | None:
        return None
