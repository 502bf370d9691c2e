"""The published families on every mesh, in real gloo worlds: the logits and the gradients of
transformers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.support.ranks import rank_programs as programs
from tests.support.ranks.family_programs import Computed, computed
from tests.support.ranks.published_families import CASES, LENGTH, published
from tests.support.ranks.rank_worlds import FLAGS, Worlds, tiny_spec
from tests.support.ranks.world_checks import assert_rebinds, digests_of
from torch import Tensor

from holdfast_workers.data.token_corpus import IGNORED
from holdfast_workers.models.llama_parameters import hugging_face_name
from holdfast_workers.spec import ModelSpec, TrainingSpec, find_faults

Agrees = Callable[[Tensor, Tensor, float], bool]


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def fits(name: str, mesh: Mapping[str, Any]) -> bool:
    """Whether a spec of the model may have the mesh."""
    spec = published(name).spec
    if mesh.get("context_method") == "ring":
        return spec.sliding_window is None
    return mesh.get("schedule") != "zero_bubble" or not spec.tied_embeddings


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """Worlds on a corpus of random bytes, so that tokens are of all parts of the vocabulary."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "part.txt").write_bytes(random.Random(3).randbytes(4000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_TEST_CORPUS", str(folder))
        yield Worlds(tmp_path_factory.mktemp("cache"))


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ({}, {}),
        ({"dp_shard": 2}, {}),
        ({"dp_shard": 2, "zero": 3}, {"activation_checkpointing": "selective"}),
        ({"dp_replicate": 2}, {}),
        ({"tp": 2}, {"activation_checkpointing": "full"}),
        ({"tp": 2, "vocabulary_parallel": True}, {"activation_checkpointing": "selective"}),
        ({"tp": 2, "sequence_parallel": True, "vocabulary_parallel": True}, {}),
        slow({"pp": 2, "schedule": "gpipe"}, {}),
        ({"pp": 2, "schedule": "1f1b"}, {}),
        slow({"pp": 2, "schedule": "interleaved"}, {}),
        ({"pp": 2, "schedule": "zero_bubble"}, {}),
        ({"cp": 2, "context_method": "all_gather"}, {}),
        ({"cp": 2, "context_method": "ulysses"}, {}),
        ({"cp": 2, "context_method": "ring"}, {}),
        slow({"dp_shard": 3}, {}),  # divides few shapes, and not the micro-batches
        slow({"dp_replicate": 2, "dp_shard": 2}, {"activation_checkpointing": "full"}),
        slow({"dp_replicate": 2, "tp": 2, "sequence_parallel": True}, {}),
        slow({"dp_shard": 2, "tp": 2, "zero": 3}, {}),
        slow({"dp_shard": 2, "cp": 2}, {"activation_checkpointing": "selective"}),
        slow({"cp": 2, "tp": 2, "sequence_parallel": True}, {}),
        slow({"pp": 2, "tp": 2, "schedule": "zero_bubble"}, {}),
        slow({"pp": 2, "tp": 2, "schedule": "zero_bubble", "sequence_parallel": True}, {}),
        slow({"pp": 2, "dp_shard": 2, "schedule": "interleaved"}, {}),
        slow({"pp": 2, "cp": 2}, {}),
        slow({"tp": 2}, {"compile": True}),
    ],
    ids=str,
)
def test_a_step_is_that_of_transformers(
    worlds: Worlds, mesh: Mapping[str, Any], changes: Mapping[str, Any]
) -> None:
    names = [name for name in CASES if fits(name, mesh)]
    if changes.get("compile"):
        names = ["qwen2, with a window", "qwen3"]  # each takes seconds
    for name, ranks in zip(names, steps_of(worlds, names, mesh, changes), strict=True):
        assert_step_of_transformers(name, ranks, bool(mesh.get("vocabulary_parallel")))


@pytest.mark.seconds
@pytest.mark.parametrize(
    "mesh", [slow({"dp_shard": 2}), {"tp": 2, "sequence_parallel": True}], ids=str
)
def test_low_precision_stays_near_it(worlds: Worlds, mesh: Mapping[str, Any]) -> None:
    names = tuple(CASES)
    steps = steps_of(worlds, names, mesh, {"dtype": "bfloat16"})
    for name, ranks in zip(names, steps, strict=True):
        assert_step_of_transformers(name, ranks, False, is_near)


@pytest.mark.seconds
@pytest.mark.parametrize("mesh", [{"tp": 2}, slow({"dp_shard": 2, "tp": 2})], ids=str)
def test_a_fault_changes_no_bit(worlds: Worlds, tmp_path: Path, mesh: Mapping[str, Any]) -> None:
    spec = tiny_spec(mesh, dropout=0.1, **FLAGS)
    expected = digests_of(worlds, spec)
    assert sorted(expected) == list(range(7))
    again = worlds.run(programs.undisturbed, spec, tmp_path)
    resumed = worlds.run(programs.resumed, spec, tmp_path, 3)
    assert [rank["digests"] for rank in again] == [expected] * len(again)
    assert resumed == [{step: expected[step] for step in range(3, 7)}] * len(resumed)
    assert_rebinds(worlds, spec, rebuild=False)


def is_close(piece: Tensor, expected: Tensor, largest: float) -> bool:
    """`largest`: of the values of which `expected` is a part."""
    return torch.allclose(piece, expected, rtol=0, atol=1e-5 * largest)


def is_near(piece: Tensor, expected: Tensor, largest: float) -> bool:
    """In bfloat16, whose unit in the last place is 2⁻⁸: no more than transformers itself errs."""
    error = float((piece - expected).square().mean().sqrt())
    return 1e-4 * largest < error < 0.1 * largest


def steps_of(
    worlds: Worlds, names: Sequence[str], mesh: Mapping[str, Any], changes: Mapping[str, Any]
) -> list[tuple[Computed, ...]]:
    """What the ranks of each model have computed. One world computes all of them."""
    specs = [spec_of(name, mesh, changes) for name in names]
    weights = [
        {key: value.numpy() for key, value in published(name).weights.items()} for name in names
    ]
    ranks = worlds.run(computed, specs[0], list(zip(specs, weights, strict=True)))
    return list(zip(*ranks, strict=True))


def spec_of(name: str, mesh: Mapping[str, Any], changes: Mapping[str, Any]) -> TrainingSpec:
    model = ModelSpec.model_validate({**published(name).spec.model_dump(), **changes})
    spec = tiny_spec(mesh).model_copy(update={"model": model})
    assert find_faults(spec) == []
    return spec


def assert_step_of_transformers(
    name: str, ranks: Sequence[Computed], vocabulary_parallel: bool, agrees: Agrees = is_close
) -> None:
    theirs = published(name).theirs
    theirs.zero_grad()
    samples = _samples(ranks)
    counted = sum(int((targets != IGNORED).sum()) for _, targets in samples.values())
    assert counted == 8 * LENGTH
    expected = {}
    for key, (inputs, targets) in samples.items():
        logits = expected[key] = theirs(inputs).logits
        loss = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        torch.autograd.backward(loss / counted)
    _assert_logits(ranks, expected, vocabulary_parallel, agrees)
    _assert_gradients(name, ranks, agrees)


Key = tuple[int, int, int]
"""Coordinates of the ranks that read the same samples, and the index of their micro-batch."""


def _key(rank: Computed, index: int) -> Key:
    return (rank.world.coordinate("dp_replicate"), rank.world.coordinate("dp_shard"), index)


def _samples(ranks: Sequence[Computed]) -> dict[Key, tuple[Tensor, Tensor]]:
    """Inputs and targets of each micro-batch of the step, (batch, sequence)."""
    found: dict[Key, tuple[Tensor, Tensor]] = {}
    for rank in ranks:
        for index, (inputs, targets) in enumerate(zip(rank.inputs, rank.targets, strict=True)):
            shape = (len(inputs), LENGTH)
            empty = (torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long))
            whole = found.setdefault(_key(rank, index), empty)
            for tensor, piece in zip(whole, (inputs, targets), strict=True):
                tensor[:, rank.positions] = torch.from_numpy(piece)
    return found


def _assert_logits(
    ranks: Sequence[Computed], expected: Mapping[Key, Tensor], divided: bool, agrees: Agrees
) -> None:
    seen = set()
    for rank in ranks:
        parts = rank.world.size("tp") if divided else 1
        for index, logits in enumerate(rank.logits):
            key = _key(rank, index)
            whole = expected[key].detach()[:, rank.positions]
            piece = whole.chunk(parts, dim=-1)[rank.world.coordinate("tp") % parts]
            assert agrees(torch.from_numpy(logits), piece, 1.0)
            seen.add(key)
    assert seen == set(expected)


def _assert_gradients(name: str, ranks: Sequence[Computed], agrees: Agrees) -> None:
    """Those of every element of every parameter."""
    theirs = dict(published(name).theirs.named_parameters())
    expected = {key: theirs[hugging_face_name(key)].grad for key in published(name).weights}
    covered = {key: np.zeros(value.shape, bool) for key, value in expected.items()}
    for rank in ranks:
        for key, (box, gradient) in rank.gradients.items():
            whole = expected[key]
            piece = torch.from_numpy(gradient)
            assert agrees(piece, whole[box], float(whole.abs().max())), (name, key)
            covered[key][box] = True
    assert [key for key, seen in covered.items() if not seen.all()] == []
