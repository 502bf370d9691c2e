"""Resharding from memory against a save and a load of PyTorch DCP on a local disk.

    python -m benchmarks.reshard --json [--pairs N] [--state-mb M] [--folder DIR]

The pairs are a sample of all pairs of meshes with at most eight ranks over `dp_replicate`,
`dp_shard` and `tp`, with two ranks per node. Under Holdfast every rank of the first mesh has its
state in its node's memory and a replica on the next node. The timed interval starts when the ranks
of the second mesh have allocated their tensors and an empty segment; it ends when every rank has
its part verified in its own segment and copied to its tensors. `torch.distributed.checkpoint` saves
the same state from DTensors on the first mesh and loads it into those on the second. Both sides
verify the result. The report includes the bytes that crossed the network, against the minimum.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path
from statistics import median

from benchmarks.conditions import machine, print_json, report, torchrun
from benchmarks.mesh_layouts import Parameter, layout_of, least_bytes, meshes
from benchmarks.reshard_nodes import RANKS_PER_NODE, NodeProcesses
from holdfast_workers.checkpoint.moves import MoveSource, plan_moves

MOST_RANKS = 8
SEED = 5
RUN_S = 900.0
LAYER_MB = 8

Mesh = dict[str, int]
Pair = tuple[Mesh, Mesh]


@dataclass(frozen=True)
class ReshardFigures:
    """One pair of meshes, from `old` to `new`."""

    old: Mesh
    new: Mesh
    holdfast_s: float
    dcp_save_s: float
    dcp_load_s: float
    moved_mb: float


@dataclass(frozen=True)
class ReshardResult:
    """The last line. `ratio` is the median over the pairs of Holdfast's time to save plus load;
    `worst_ratio` the greatest."""

    ratio: float
    worst_ratio: float
    moved_vs_least: float
    pairs: list[ReshardFigures]


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    parameters = model(options.state_mb)
    pairs = sample(options.pairs, options.most_ranks)
    report(f"{len(pairs)} pairs, {options.state_mb} MB; {machine()}")
    ours = from_memory(parameters, pairs, options.most_ranks)
    theirs = stock(parameters, pairs, options.most_ranks, Path(options.folder))
    found = summary(pairs, ours, theirs, [moved(parameters, *pair) for pair in pairs])
    if options.json:
        print_json(found)
    return 0


def model(state_mb: int) -> tuple[Parameter, ...]:
    """Layers of two matrices, one sharded by columns and one by rows, and a norm. Not every mesh
    divides the sizes of the matrices."""
    found: list[Parameter] = []
    for layer in range(-(-state_mb // LAYER_MB)):
        found += [
            Parameter(f"{layer}.up", (1020, 1028), tp_dim=0),
            Parameter(f"{layer}.down", (1024, 1025), tp_dim=1),
            Parameter(f"{layer}.norm", (1024,)),
        ]
    return tuple(found)


def sample(count: int, most_ranks: int = MOST_RANKS) -> list[Pair]:
    """Pairs of different meshes with more than one rank, the same pairs in every run."""
    every = [mesh for mesh in meshes(most_ranks) if math.prod(mesh.values()) > 1]
    return random.Random(SEED).sample(list(permutations(every, 2)), count)


def from_memory(
    parameters: tuple[Parameter, ...], pairs: Sequence[Pair], most_ranks: int
) -> list[float]:
    """Seconds per pair."""
    nodes = NodeProcesses(-(-most_ranks // RANKS_PER_NODE), parameters, SEED)
    try:
        found = []
        for old, new in pairs:
            found.append(nodes.reshard(nodes.hold(old), new))
            nodes.free()
            report(f"{old} → {new}: from memory in {found[-1]:.3f} s")
        return found
    finally:
        nodes.close()


def stock(
    parameters: tuple[Parameter, ...], pairs: Sequence[Pair], most_ranks: int, folder: Path
) -> list[tuple[float, float]]:
    """Seconds of save and load per pair."""
    scratch = Path(tempfile.mkdtemp(prefix="bench-", dir=folder))
    try:
        pairs_file, out = scratch / "pairs.json", scratch / "rows.jsonl"
        listed = [asdict(parameter) for parameter in parameters]
        pairs_file.write_text(json.dumps({"parameters": listed, "seed": SEED, "pairs": pairs}))
        program = ("benchmarks.reshard_stock", str(pairs_file), str(scratch), str(out))
        done = torchrun(most_ranks, *program, timeout_s=RUN_S)
        rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        if len(rows) < len(pairs):
            raise RuntimeError(f"failed at pair {len(rows)}:\n{done.stderr[-4000:]}")
        for (old, new), (save_s, load_s) in zip(pairs, rows, strict=True):
            report(f"{old} → {new}: saved in {save_s:.3f} s, loaded in {load_s:.3f} s")
        return [(save_s, load_s) for save_s, load_s in rows]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def moved(parameters: tuple[Parameter, ...], old: Mesh, new: Mesh) -> tuple[int, int]:
    """Bytes that cross the network, and the least possible."""
    held = [layout_of(parameters, old, rank) for rank in range(math.prod(old.values()))]
    node_count = -(-len(held) // RANKS_PER_NODE)
    total = least = 0
    for rank in range(math.prod(new.values())):
        target, node = layout_of(parameters, new, rank), rank // RANKS_PER_NODE
        sources = [
            MoveSource(f"n{holder}", other, layout, near=holder == node)
            for other, layout in enumerate(held)
            for holder in {other // RANKS_PER_NODE, (other // RANKS_PER_NODE + 1) % node_count}
        ]
        total += plan_moves(target, sources, rank).moved_bytes(sources)
        least += least_bytes(target, [source.layout for source in sources if source.near])
    return total, least


def summary(
    pairs: Sequence[Pair],
    ours_s: Sequence[float],
    theirs_s: Sequence[tuple[float, float]],
    bytes_moved: Sequence[tuple[int, int]],
) -> ReshardResult:
    ratios = [ours / sum(theirs) for ours, theirs in zip(ours_s, theirs_s, strict=True)]
    return ReshardResult(
        ratio=round(median(ratios), 4),
        worst_ratio=round(max(ratios), 4),
        moved_vs_least=round(
            max((total / least for total, least in bytes_moved if least), default=1.0), 4
        ),
        pairs=[
            ReshardFigures(
                old=old,
                new=new,
                holdfast_s=round(ours, 4),
                dcp_save_s=round(save, 4),
                dcp_load_s=round(load, 4),
                moved_mb=round(total / 1e6, 1),
            )
            for (old, new), ours, (save, load), (total, _) in zip(
                pairs, ours_s, theirs_s, bytes_moved, strict=True
            )
        ],
    )


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reshard", description=__doc__)
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of meshes; default 10")
    parser.add_argument(
        "--most-ranks", type=int, default=MOST_RANKS, help=f"of a mesh; default {MOST_RANKS}"
    )
    parser.add_argument("--state-mb", type=int, default=128, help="of all ranks; default 128")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="folder on a local disk")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
