"""Parity of every mesh and option with one process: parameters after five AdamW steps.

Each row trains a built-in model of a tiny size on real ranks (gloo), in float32, and compares
each parameter, assembled from the ranks' pieces, with that of one process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tests.support.ranks import rank_programs as programs
from tests.support.ranks.corpora import small_corpus
from tests.support.ranks.rank_worlds import Worlds, tiny_spec, tiny_vit_spec
from tests.support.ranks.toy_images import write_images
from torch import Tensor

from benchmarks.conditions import describe_mesh, report

TOLERANCE = 1e-5
STEPS = 5
LEARNING_RATE = 3e-3

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


SEQUENCE = {"sequence_parallel": True}
BOTH = {"sequence_parallel": True, "vocabulary_parallel": True}
SELECTIVE = {"activation_checkpointing": "selective"}
OPTIONS = (
    Option("plain"),
    Option("zero 1", {"zero": 1}, needs="dp_shard"),
    Option("zero 2", {"zero": 2}, needs="dp_shard"),
    Option("zero 3", {"zero": 3}, needs="dp_shard"),
    Option("sequence", SEQUENCE, needs="tp"),
    Option("vocabulary", {"vocabulary_parallel": True}, needs="tp"),
    Option("sequence, vocabulary, zero 3, selective", {**BOTH, "zero": 3}, SELECTIVE, "tp"),
    Option("ring", {"context_method": "ring"}, needs="cp"),
    Option("ulysses", {"context_method": "ulysses"}, {"kv_heads": 4}, "cp"),
    Option("ring, zero 3, selective", {"context_method": "ring", "zero": 3}, SELECTIVE, "cp"),
    Option("full checkpointing", model={"activation_checkpointing": "full"}),
    Option("selective checkpointing", model=SELECTIVE),
    Option("tied embeddings", model={"tied_embeddings": True}),
    Option("gpipe", {"schedule": "gpipe"}, needs="pp"),
    Option("interleaved", {"schedule": "interleaved"}, {"layers": 4}, "pp"),
    Option("zero bubble", {"schedule": "zero_bubble"}, {"layers": 4}, "pp"),
    Option(
        "zero bubble, sequence, vocabulary",
        {**BOTH, "schedule": "zero_bubble"},
        {"layers": 4},
        "pp",
    ),
    Option(
        "interleaved, ring, tied, uneven",
        {"schedule": "interleaved", "context_method": "ring"},
        {"layers": 5, "tied_embeddings": True},
        "pp",
    ),
    Option("vit", model={"family": "vit"}),
    Option(
        "vit, sequence, zero 3, selective",
        {**SEQUENCE, "zero": 3},
        {**SELECTIVE, "family": "vit"},
        "tp",
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
def parity(folder: Path) -> Iterator[Parity]:
    """Compare meshes with a corpus, images and a cache of their own in `folder`."""
    corpus, images = folder / "corpus", folder / "images"
    corpus.mkdir()
    write_images(images)
    with small_corpus(corpus), patch.dict(os.environ, HOLDFAST_TEST_IMAGES=str(images)):
        yield Parity(Worlds(folder / "cache"))


def differences(meshes: Sequence[Mapping[str, int]], folder: Path) -> dict[str, float]:
    """Return the difference of each row by its name, and print them as a Markdown table."""
    with parity(folder) as measured:
        found = {}
        for row in rows(meshes):
            found[row.name] = measured.difference(row)
            report(f"{row.name}: {found[row.name]:.1e}")
    print(f"| Mesh | {' | '.join(option.name for option in OPTIONS)} |")
    print("|---" * (len(OPTIONS) + 1) + "|")
    for mesh in MESHES:
        cells = [found.get(Row(mesh, option).name) for option in OPTIONS]
        shown = ["" if cell is None else f"{cell:.0e}" for cell in cells]
        print(f"| `{describe_mesh(mesh)}` | {' | '.join(shown)} |")
    return found
