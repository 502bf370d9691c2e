"""The frozen copies that savers read, in the node's shared memory: their names, and how one is
made of a memory checkpoint.

The attempt is in the name: the next one may come to the same step while this one's saver still
reads.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from holdfast_workers.memory.segment import Commit, Overtaken, Segment

PATTERN = "save-*.seg"
FREEZE_S = 60.0
"""For so long a writer is asked to leave a commit alone that is being frozen."""


def copy_path(root: Path, rank: int, step: int, attempt: int) -> Path:
    return root / f"save-{rank}-{step}-{attempt}.seg"


def attempt_of(copy: Path) -> int:
    return int(copy.stem.rpartition("-")[2])


def freeze(path: Path, segment: Segment, commit: Commit) -> None:
    """Make the copy at `path` of `commit`. Raises Overtaken if that is not what has been copied."""
    with Segment.create(path, segment.layout) as copy:
        segment.pin(commit, FREEZE_S)
        try:
            target = np.frombuffer(copy.begin(commit.step), dtype=np.uint8)
            target[:] = np.frombuffer(segment.payload(commit), dtype=np.uint8)
        finally:
            segment.unpin()
        frozen = copy.commit(attempt=commit.attempt, step=commit.step, digest=commit.digest)
        if not copy.verify(frozen):
            raise Overtaken(f"{segment.path}: step {commit.step} was not whole when it was frozen")
