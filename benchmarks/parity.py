"""Parity of every mesh and option with one process: parameters after five AdamW steps.

    python -m benchmarks.parity --json [--meshes N] [--write]

Each row trains a built-in model of a tiny size on real ranks (gloo), in float32, and compares
each parameter, assembled from the ranks' pieces, with that of one process. `--write` puts the table
into `docs/parallelism.md`. An option whose difference exceeds `TOLERANCE` ends the run with 1.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tests.support.ranks import rank_programs as programs
from tests.support.ranks.rank_worlds import Worlds, tiny_spec, tiny_vit_spec
from tests.support.ranks.toy_images import write_images
from torch import Tensor

from benchmarks.conditions import ROOT, describe_mesh, print_json, report

TOLERANCE = 1e-5
STEPS = 5
LEARNING_RATE = 3e-3
PAGE = ROOT / "docs" / "parallelism.md"
BEGIN, END = "<!-- parity: begin -->\n", "<!-- parity: end -->\n"

MESHES: tuple[Mapping[str, int], ...] = (
    {"dp_replicate": 2},
    {"dp_shard": 2},
    {"dp_shard": 4},
    {"tp": 2},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_replicate": 2, "tp": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_shard": 4, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    {"cp": 2},
    {"cp": 4},
    {"dp_shard": 2, "cp": 2},
    {"dp_replicate": 2, "cp": 2},
    {"cp": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2, "tp": 2},
    {"pp": 2},
    {"pp": 2, "dp_shard": 2},
    {"pp": 2, "dp_replicate": 2},
    {"pp": 2, "tp": 2},
    {"pp": 2, "dp_shard": 2, "tp": 2},
    {"pp": 2, "cp": 2},
)
"""Every axis alone, every pair, and triples, on 2 to 8 ranks."""


@dataclass(frozen=True)
class Option:
    """A way to train on a mesh."""

    name: str
    parallel: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""
    """An axis without which the option does nothing."""


OPTIONS = (
    Option("plain"),
    Option("zero 1", {"zero": 1}, needs="dp_shard"),
    Option("zero 2", {"zero": 2}, needs="dp_shard"),
    Option("zero 3", {"zero": 3}, needs="dp_shard"),
    Option("sequence", {"sequence_parallel": True}, needs="tp"),
    Option("vocabulary", {"vocabulary_parallel": True}, needs="tp"),
    Option(
        "sequence, vocabulary, zero 3, selective",
        {"sequence_parallel": True, "vocabulary_parallel": True, "zero": 3},
        {"activation_checkpointing": "selective"},
        needs="tp",
    ),
    Option("ring", {"context_method": "ring"}, needs="cp"),
    Option("ulysses", {"context_method": "ulysses"}, {"kv_heads": 4}, needs="cp"),
    Option(
        "ring, zero 3, selective",
        {"context_method": "ring", "zero": 3},
        {"activation_checkpointing": "selective"},
        needs="cp",
    ),
    Option("full checkpointing", model={"activation_checkpointing": "full"}),
    Option("selective checkpointing", model={"activation_checkpointing": "selective"}),
    Option("tied embeddings", model={"tied_embeddings": True}),
    Option("gpipe", {"schedule": "gpipe"}, needs="pp"),
    Option("interleaved", {"schedule": "interleaved"}, {"layers": 4}, needs="pp"),
    Option("zero bubble", {"schedule": "zero_bubble"}, {"layers": 4}, needs="pp"),
    Option(
        "zero bubble, sequence, vocabulary",
        {"schedule": "zero_bubble", "sequence_parallel": True, "vocabulary_parallel": True},
        {"layers": 4},
        needs="pp",
    ),
    Option(
        "interleaved, ring, tied, uneven",
        {"schedule": "interleaved", "context_method": "ring"},
        {"layers": 5, "tied_embeddings": True},
        needs="pp",
    ),
    Option("vit", model={"family": "vit"}),
    Option(
        "vit, sequence, zero 3, selective",
        {"sequence_parallel": True, "zero": 3},
        {"family": "vit", "activation_checkpointing": "selective"},
        needs="tp",
    ),
)
OF_THE_MODEL = ("family", "tied_embeddings", "layers", "kv_heads")
"""Fields of an option that change the model itself, also in one process."""


@dataclass(frozen=True)
class Row:
    """A mesh with an option."""

    mesh: Mapping[str, int]
    option: Option

    @property
    def name(self) -> str:
        return f"{describe_mesh(self.mesh)}, {self.option.name}"


def rows(meshes: Sequence[Mapping[str, int]] = MESHES) -> Iterator[Row]:
    """Every mesh with every option that does something on it and that a job may have."""
    for mesh in meshes:
        for option in OPTIONS:
            if option.needs and mesh.get(option.needs, 1) == 1:
                continue
            if mesh.get("pp", 1) > 1 and option.parallel.get("zero", 1) > 1:
                continue  # a pipeline keeps its stages whole
            if mesh.get("cp", 1) > 1 and option.model.get("family") == "vit":
                continue  # images are not divided
            yield Row(mesh, option)


@dataclass(frozen=True)
class ParityResult:
    """The last line: the greatest differences of a parameter, of all rows and of each."""

    rows: int
    tolerance: float
    greatest: float
    differences: dict[str, float]


class Parity:
    """Trains rows, and the one process that they are compared with."""

    def __init__(self, worlds: Worlds) -> None:
        self._worlds = worlds
        self._alone: dict[str, dict[str, Tensor]] = {}
        """What changes the model itself -> the parameters that one process trains."""

    def difference(self, row: Row) -> float:
        """The greatest absolute difference of a parameter from that of one process."""
        model = row.option.model
        own = {name: model[name] for name in OF_THE_MODEL if name in model}
        if str(own) not in self._alone:
            self._alone[str(own)] = self._trained({}, own)
        found = self._trained({**row.mesh, **row.option.parallel}, model)
        expected = self._alone[str(own)]
        assert found.keys() == expected.keys()
        return max(float((found[name] - expected[name]).abs().max()) for name in expected)

    def _trained(self, parallel: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Tensor]:
        tiny = tiny_vit_spec if model.get("family") == "vit" else tiny_spec
        spec = tiny(parallel, steps=STEPS, **model)
        optimizer = spec.train.optimizer.model_copy(update={"lr": LEARNING_RATE})
        train = spec.train.model_copy(update={"optimizer": optimizer})
        spec = spec.model_copy(update={"train": train})
        whole: dict[str, Tensor] = {}
        for pieces in self._worlds.run(programs.trained_parameters, spec):
            for name, (shape, slices, piece) in pieces.items():
                tensor = whole.setdefault(name, torch.full(shape, torch.nan))
                tensor[slices] = torch.from_numpy(piece)
        assert not any(bool(tensor.isnan().any()) for tensor in whole.values()), (
            "pieces are missing"
        )
        return whole


@contextmanager
def parity() -> Iterator[Parity]:
    """With a corpus, images and a cache of its own."""
    with tempfile.TemporaryDirectory(prefix="hf-parity-") as folder:
        words = random.Random(5)
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        text = " ".join(str(words.randrange(100)) for _ in range(12_000))
        (corpus / "part.txt").write_text(text)
        images = Path(folder) / "images"
        write_images(images)
        data = {"HOLDFAST_TEST_CORPUS": str(corpus), "HOLDFAST_TEST_IMAGES": str(images)}
        with patch.dict(os.environ, data):
            yield Parity(Worlds(Path(folder) / "cache"))


def table(found: Mapping[tuple[str, str], float]) -> str:
    """The differences as Markdown: a line per mesh, a column per option."""
    names = [option.name for option in OPTIONS]
    lines = [f"| Mesh | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for mesh in MESHES:
        axes = describe_mesh(mesh)
        cells = [found.get((axes, name)) for name in names]
        shown = ["" if cell is None else f"{cell:.0e}" for cell in cells]
        lines.append(f"| `{axes}` | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    parser.add_argument("--meshes", type=int, help="use only the first so many")
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    options = parser.parse_args(arguments)
    found: dict[tuple[str, str], float] = {}
    with parity() as measured:
        for row in rows(MESHES[: options.meshes]):
            difference = measured.difference(row)
            found[describe_mesh(row.mesh), row.option.name] = difference
            report(f"{prod(row.mesh.values())} ranks: {row.name}: {difference:.1e}")
    lines = table(found)
    print(lines)
    if options.write:
        text = PAGE.read_text()
        before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
        PAGE.write_text(text[:before] + "\n" + lines + "\n" + text[after:])
    worst = max(found.values())
    report(f"greatest difference {worst:.1e} of {len(found)} rows; tolerance {TOLERANCE:g}")
    if options.json:
        differences = {f"{axes}, {option}": off for (axes, option), off in found.items()}
        print_json(ParityResult(len(found), TOLERANCE, worst, differences))
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
