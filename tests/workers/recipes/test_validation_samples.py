"""An evaluation reads the same samples on every mesh, each once, whatever training does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.support.data.token_sets import MadeSet, random_shards
from tests.support.ranks.rank_worlds import tiny_spec

from holdfast_workers.data.corpus import CorpusError
from holdfast_workers.data.token_corpus import IGNORED
from holdfast_workers.recipes.micro_batches import MicroBatch
from holdfast_workers.recipes.validation_samples import BatchShare, ValidationSamples
from holdfast_workers.spec import DataSpec, EvaluateSpec, SourceSpec, TrainingSpec
from holdfast_workers.spec.train import ValidationSpec
from holdfast_workers.training.recipe import World

HELD = MadeSet("held", random_shards(2, [150, 9, 170, 3]))
WEB = MadeSet("web", random_shards(1, [75, 40]), held_out=random_shards(3, [90, 40]))
CODE = MadeSet("code", random_shards(4, [75]), held_out=random_shards(5, [140]))
PLAIN = MadeSet("plain", random_shards(6, [50]))
LENGTH = 32


def spec_of(cache: Path, *, share: bool = False, batches: int | None = None) -> TrainingSpec:
    sources = tuple(SourceSpec(path=f"/{name}") for name in ("web", "code", "plain"))
    prepared = tuple(made.put_into_cache(cache) for made in (WEB, CODE, PLAIN))
    validation = ValidationSpec(share=0.4)
    if not share:
        validation = ValidationSpec(path="/held", prepared=HELD.put_into_cache(cache))
    data = DataSpec(sources=sources, prepared=prepared, validation=validation)
    evaluate = EvaluateSpec(every_steps=2, batches=batches)
    spec = tiny_spec({}, corpus="unused")
    return spec.model_copy(update={"data": data, "evaluate": evaluate})


def opened(spec: TrainingSpec, cache: Path) -> ValidationSamples:
    return ValidationSamples.open(spec, cache, _unnoticed)


def world(rank: int, ranks: int) -> World:
    return World(rank, ranks, {"dp_shard": ranks}, 1, "cpu")


def read(spec: TrainingSpec, cache: Path, batch: int, ranks: int = 1) -> list[list[MicroBatch]]:
    """The micro-batches of each rank."""
    samples = opened(spec, cache)
    return [
        [*samples.read(BatchShare(batch, world(rank, ranks)), spec.train, None)]
        for rank in range(ranks)
    ]


def targets_of(ranks: list[list[MicroBatch]]) -> list[list[int]]:
    """The targets of each sample, in order."""
    rows = [row for own in ranks for each in own for row in each.targets.tolist()]
    kept = [[token for token in row if token != IGNORED] for row in rows]
    return sorted(row for row in kept if row)


def windows_of(shards: list[list[int]]) -> list[list[int]]:
    return sorted(
        tokens[start + 1 : start + LENGTH + 1]
        for tokens in shards
        for start in range(0, len(tokens) - 1, LENGTH)
    )


@pytest.mark.parametrize("share", [False, True], ids=["files", "share"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_batches_have_each_sample_once(tmp_path: Path, share: bool, ranks: int) -> None:
    spec = spec_of(tmp_path, share=share)
    samples = opened(spec, tmp_path)
    shards = random_shards(2, [150, 9, 170, 3])
    if share:
        shards = [*random_shards(3, [90, 40]), *random_shards(5, [140])]
    batches = [read(spec, tmp_path, batch, ranks) for batch in range(samples.batches(spec.train))]
    assert targets_of([own for each in batches for own in each]) == windows_of(shards)
    counted = sum(each.counted for batch in batches for own in batch for each in own)
    assert counted == samples.targets == sum(len(tokens) - 1 for tokens in shards)
    assert samples.samples == len(windows_of(shards)) > spec.train.global_batch


def test_every_micro_batch_has_the_shape_of_training(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    last = opened(spec, tmp_path).batches(spec.train) - 1
    for own in read(spec, tmp_path, last, 2):
        assert len(own) == 2
        for each in own:
            assert each.inputs.shape == each.targets.shape == (spec.train.micro_batch, LENGTH)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_batch_is_the_same_on_every_mesh(tmp_path: Path, ranks: int) -> None:
    spec = spec_of(tmp_path)
    for batch in range(2):
        alone, together = read(spec, tmp_path, batch), read(spec, tmp_path, batch, ranks)
        assert targets_of(alone) == targets_of(together)
        digests = [sum(each.digest for own in ranks for each in own) for ranks in (alone, together)]
        assert digests[0] % 2**64 == digests[1] % 2**64


def test_a_batch_depends_on_neither_seed_nor_number_of_batches(tmp_path: Path) -> None:
    spec, one = spec_of(tmp_path), spec_of(tmp_path, batches=1)
    train = spec.train.model_copy(update={"seed": spec.train.seed + 1})
    expected = targets_of(read(spec, tmp_path, 0))
    assert targets_of(read(one, tmp_path, 0)) == expected
    other = spec.model_copy(update={"train": train})
    assert targets_of(read(other, tmp_path, 0)) == expected
    assert opened(one, tmp_path).samples == spec.train.global_batch
    assert opened(one, tmp_path).targets == sum(map(len, expected))


def test_more_batches_than_there_are_read_all_once(tmp_path: Path) -> None:
    every, many = (opened(spec_of(tmp_path, batches=n), tmp_path) for n in (None, 1000))
    assert (many.samples, many.targets) == (every.samples, every.targets)


def test_sets_without_documents_of_validation_are_refused(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, share=True)
    sources, prepared = spec.data.sources[2:], spec.data.prepared[2:]
    data = spec.data.model_copy(update={"sources": sources, "prepared": prepared})
    with pytest.raises(CorpusError, match=r"data\.validation, and the token sets have none"):
        opened(spec.model_copy(update={"data": data}), tmp_path)


def _unnoticed() -> AbstractContextManager[Callable[[], None]]:
    raise AssertionError("nothing is waited for")
