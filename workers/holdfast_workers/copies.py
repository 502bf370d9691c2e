"""How the frozen copies are named that workers leave for savers, in the node's shared memory.

The attempt is in the name: the next one may come to the same step while this one's saver still
reads.
"""

from __future__ import annotations

from pathlib import Path

PATTERN = "save-*.seg"


def copy_path(root: Path, rank: int, step: int, attempt: int) -> Path:
    return root / f"save-{rank}-{step}-{attempt}.seg"


def attempt_of(copy: Path) -> int:
    return int(copy.stem.rpartition("-")[2])
