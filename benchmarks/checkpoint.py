"""Memory checkpoints: saves, those of users' programs, restores and resharding.

    python -m benchmarks.checkpoint --json [--parts saves tier restore reshard] [--ranks N ...]

Each part is a module of `benchmarks.checkpoint_parts`, which says what it measures, and against
what: torch's savers and the machine's floor (`saves`), PyTorch's checkpoints on a local disk
(`tier`, `reshard`), a raw stream over loopback (`restore`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoint_parts import reshard, restore, saves, tier
from benchmarks.checkpoint_parts.reshard import ReshardFigures
from benchmarks.checkpoint_parts.restore import RestoreFigures
from benchmarks.checkpoint_parts.saves import SaveFigures
from benchmarks.checkpoint_parts.tier import TierFigures
from benchmarks.conditions import parser, print_json, report, report_conditions
from holdfast_workers.ipc.children import COPY_TUNING

PARTS = ("saves", "tier", "restore", "reshard")


@dataclass(frozen=True)
class CheckpointResult:
    """The last line; `saves` by the number of ranks. None, or empty: the part was left out."""

    saves: dict[str, SaveFigures]
    tier: TierFigures | None
    restore: RestoreFigures | None
    reshard: ReshardFigures | None


def main(arguments: list[str] | None = None) -> int:
    options = _options().parse_args(arguments)
    report_conditions()
    os.environ |= COPY_TUNING  # of processes that this one starts, as Holdfast's ranks have it
    disk = Path(tempfile.mkdtemp(prefix="bench-", dir=options.folder))
    memory = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
    of_saves, of_tier, of_restore, of_reshard = {}, None, None, None
    try:
        for ranks in options.ranks if "saves" in options.parts else ():
            report(f"{ranks} ranks of {options.state_mb} MB each, {options.steps} steps")
            of_saves[str(ranks)] = saves.measure(ranks, options, memory)
        if "tier" in options.parts:
            of_tier = tier.measure(options.tier_mb, options.rounds, memory / "tier", disk)
        if "restore" in options.parts:
            of_restore = restore.measure(options.state_mb, options.rounds, memory / "restore")
        if "reshard" in options.parts:
            of_reshard = reshard.measure(
                options.reshard_mb, options.pairs, options.most_ranks, memory, disk
            )
    finally:
        for folder in (disk, memory):
            shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print_json(CheckpointResult(of_saves, of_tier, of_restore, of_reshard))
    return 0


def _options() -> argparse.ArgumentParser:
    options = parser("checkpoint", __doc__)
    for name, default, meaning in (
        ("state-mb", 256, "per rank, of saves and restores"),
        ("steps", 50, "of each run with saves"),
        ("work", 300, "matrix products per step"),
        ("tier-mb", 192, "of both ranks of `tier` together"),
        ("rounds", 7, "of `tier` and of restores"),
        ("reshard-mb", 128, "of all ranks of `reshard`"),
        ("pairs", 10, "pairs of meshes"),
        ("most-ranks", 8, "of a mesh"),
    ):
        options.add_argument(
            f"--{name}", type=int, default=default, help=f"{meaning}; default {default}"
        )
    options.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="default: all")
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default 2 and 4")
    options.add_argument(
        "--savers",
        nargs="+",
        default=saves.SAVERS,
        choices=saves.SAVERS,
        help="PyTorch's; default: all; `none` is always needed",
    )
    options.add_argument("--folder", type=Path, help="on a local disk; default: the temporary one")
    return options


if __name__ == "__main__":
    sys.exit(main())
