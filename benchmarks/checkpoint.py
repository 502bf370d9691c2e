"""Memory checkpoints: saves, those of users' programs, restores and resharding.

    python -m benchmarks.checkpoint --json [--parts saves tier restore reshard] [--ranks N ...]

Each part is a module of `benchmarks.checkpoint_parts`, which says what it measures, and against
what: torch's savers and the machine's floor (`saves`), PyTorch's checkpoints on a local disk
(`tier`, `reshard`), a raw stream over loopback (`restore`).
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.checkpoint_parts import reshard, restore, saves, tier
from benchmarks.checkpoint_parts.reshard import ReshardFigures
from benchmarks.checkpoint_parts.restore import RestoreFigures
from benchmarks.checkpoint_parts.saves import SAVERS, SaveFigures, Saver
from benchmarks.checkpoint_parts.tier import TierFigures
from benchmarks.conditions import report, run
from holdfast_workers.ipc.children import COPY_TUNING

Part = Literal["saves", "tier", "restore", "reshard"]


@dataclass(frozen=True)
class CheckpointResult:
    """The last line; `saves` by the number of ranks. None, or empty: the part was left out."""

    saves: dict[str, SaveFigures]
    tier: TierFigures | None
    restore: RestoreFigures | None
    reshard: ReshardFigures | None


def measure(
    state_mb: int = 256,
    steps: int = 50,
    work: int = 300,
    tier_mb: int = 192,
    rounds: int = 7,
    reshard_mb: int = 128,
    pairs: int = 10,
    most_ranks: int = 8,
    parts: tuple[Part, ...] = ("saves", "tier", "restore", "reshard"),
    ranks: tuple[int, ...] = (2, 4),
    savers: tuple[Saver, ...] = SAVERS,
    folder: Path | None = None,
) -> CheckpointResult:
    """Measure each part.

    Args:
        state_mb: per rank, of saves and restores
        steps: of each run with saves
        work: matrix products per step
        tier_mb: of both ranks of `tier` together
        rounds: of `tier` and of restores
        reshard_mb: of all ranks of `reshard`
        pairs: of meshes
        most_ranks: of a mesh of `reshard`
        ranks: of saves
        savers: PyTorch's; `none` is always needed
        folder: on a local disk; default: the temporary one
    """
    os.environ |= COPY_TUNING  # of processes that this one starts, as Holdfast's ranks have it
    of_saves: dict[str, SaveFigures] = {}
    with (
        tempfile.TemporaryDirectory(
            prefix="bench-", dir=folder, ignore_cleanup_errors=True
        ) as on_disk,
        tempfile.TemporaryDirectory(
            prefix="bench-", dir="/dev/shm", ignore_cleanup_errors=True
        ) as in_memory,
    ):
        disk, memory = Path(on_disk), Path(in_memory)
        for count in ranks if "saves" in parts else ():
            report(f"{count} ranks of {state_mb} MB each, {steps} steps")
            job = saves.job(count, state_mb, steps, work)
            of_saves[str(count)] = saves.measure(job, state_mb, savers, memory / f"of-{count}")
        return CheckpointResult(
            of_saves,
            tier.measure(tier_mb, rounds, memory / "tier", disk) if "tier" in parts else None,
            restore.measure(state_mb, rounds, memory / "restore") if "restore" in parts else None,
            reshard.measure(reshard_mb, pairs, most_ranks, memory, disk)
            if "reshard" in parts
            else None,
        )


if __name__ == "__main__":
    run(measure)
