"""Frozen copies of memory checkpoints, in the node's shared memory, from which savers read.

Owns their file names and makes them. The name contains the attempt: the next attempt may reach the
same step while a saver of this one still reads.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from holdfast_workers.memory.segment import Commit, Overwritten, Segment

PATTERN = "save-*.seg"
FREEZE_S = 60.0
"""How long the commit is pinned against its writer while it is being copied."""


def copy_path(root: Path, rank: int, step: int, attempt: int) -> Path:
    """Path of the frozen copy of one rank's state."""
    return root / f"save-{rank}-{step}-{attempt}.seg"


def attempt_of(copy: Path) -> int:
    """The attempt that computed the state of the frozen copy at this path."""
    return int(copy.stem.rpartition("-")[2])


def freeze(path: Path, segment: Segment, commit: Commit) -> None:
    """Copy `commit` to `path`. Raises Overwritten if the commit changed while it was copied."""
    with Segment.create(path, segment.layout) as copy:
        segment.pin(commit, FREEZE_S)
        try:
            target = np.frombuffer(copy.begin(commit.step), dtype=np.uint8)
            target[:] = np.frombuffer(segment.payload(commit), dtype=np.uint8)
        finally:
            segment.unpin()
        frozen = copy.commit(attempt=commit.attempt, step=commit.step, digest=commit.digest)
        if not copy.verify(frozen):
            raise Overwritten(f"{segment.path}: step {commit.step} changed while it was frozen")
