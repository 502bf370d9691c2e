"""Throughput of the training core on each kind of mesh, against the same parallelism in torch.

    python -m benchmarks.meshes --json [--rounds N] [--steps N] [--meshes N] [--parity-meshes N]

Both sides train the same model in the same processes and take turns (`benchmarks.mesh_ranks`). A
ratio is tokens per second of Holdfast's core divided by torch's, per round; its lower bound is the
least ratio but one, which the median of nine rounds exceeds with a probability of 98%.

Then every mesh with every option is compared with one process (`benchmarks.mesh_parity`). A
parameter that differs by more than the tolerance ends the run with 1.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from unittest.mock import patch

from tests.support.ranks.corpora import small_corpus
from tests.support.ranks.rank_worlds import Worlds, tiny_spec

from benchmarks import mesh_parity, mesh_ranks
from benchmarks.conditions import describe_mesh, report, run
from holdfast_workers.spec import CheckpointSpec, TrainingSpec

MESHES: tuple[Mapping[str, int], ...] = (
    {"dp_shard": 4},
    {"dp_shard": 2, "tp": 2},
    {"pp": 2, "dp_shard": 2},
    {"dp_shard": 2, "cp": 2},
)
MICRO_BATCHES = 4
"""Of each data-parallel rank."""
LEARNING_RATE = 3e-4
ENOUGH = 9
"""Rounds from which the least ratio but one is the bound; with fewer, it is the least."""


@dataclass(frozen=True)
class MeshSpeed:
    """One mesh's median seconds of a step on either side, and the ratio of tokens per second."""

    holdfast_s: float
    torch_s: float
    ratio: float
    lower: float


@dataclass(frozen=True)
class MeshesResult:
    """The last line: the least of the lower bounds, and each mesh; the greatest difference of a
    parameter from that of one process, and of each mesh with each option."""

    worst_ratio: float
    meshes: dict[str, MeshSpeed]
    greatest_difference: float
    tolerance: float
    differences: dict[str, float]


def measure(
    rounds: int = 9,
    steps: int = 2,
    meshes: int | None = None,
    parity_meshes: int | None = None,
    dim: int = 256,
) -> MeshesResult:
    """Measure speeds, then differences.

    Args:
        steps: of either side, per round
        meshes: measure only the first so many
        parity_meshes: compare only the first so many
    """
    with (
        tempfile.TemporaryDirectory(prefix="hf-meshes-") as folder,
        patch.dict(os.environ, OMP_NUM_THREADS="1"),
    ):
        corpus = Path(folder) / "words"
        corpus.mkdir()
        with small_corpus(corpus):
            worlds = Worlds(Path(folder) / "words-cache")
            speeds = {
                describe_mesh(mesh): _speed(worlds, training_on(mesh, dim), rounds, steps)
                for mesh in MESHES[:meshes]
            }
        differences = mesh_parity.differences(mesh_parity.MESHES[:parity_meshes], Path(folder))
    return MeshesResult(
        worst_ratio=min(speed.lower for speed in speeds.values()),
        meshes=speeds,
        greatest_difference=max(differences.values(), default=0.0),
        tolerance=mesh_parity.TOLERANCE,
        differences=differences,
    )


def _speed(worlds: Worlds, spec: TrainingSpec, rounds: int, steps: int) -> MeshSpeed:
    times: list[tuple[float, float]]
    times = worlds.run(mesh_ranks.alternate, spec, rounds, steps)[0]
    ratios = sorted(theirs / ours for ours, theirs in times)
    found = MeshSpeed(
        holdfast_s=round(median(ours for ours, _ in times), 4),
        torch_s=round(median(theirs for _, theirs in times), 4),
        ratio=round(median(ratios), 4),
        lower=round(ratios[1 if len(ratios) >= ENOUGH else 0], 4),
    )
    report(f"{describe_mesh(spec.parallel.mesh)}: {found}")
    return found


def training_on(mesh: Mapping[str, int], dim: int) -> TrainingSpec:
    """A model whose step takes half a second or more on two processors."""
    spec = tiny_spec(
        dict(mesh), steps=1_000_000, dim=dim, layers=4, heads=8, kv_heads=4, sequence_length=256
    )
    shares = prod(mesh.get(axis, 1) for axis in ("dp_replicate", "dp_shard"))
    # Small, because numbers of a model that diverges may be so small that processors are slow.
    optimizer = spec.train.optimizer.model_copy(update={"lr": LEARNING_RATE})
    changes = {"global_batch": 2 * MICRO_BATCHES * shares, "optimizer": optimizer}
    train = spec.train.model_copy(update=changes)
    checkpoint = CheckpointSpec(digest_every_steps=0)
    return spec.model_copy(update={"train": train, "checkpoint": checkpoint})


if __name__ == "__main__":
    sys.exit(int(run(measure).greatest_difference > mesh_parity.TOLERANCE))
