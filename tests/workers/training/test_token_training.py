"""Training on token sets whose shards end in short windows: the curve of one process on any mesh,
and each token once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.support.data.token_sets import MadeSet, random_shards
from tests.support.ranks import rank_programs as programs
from tests.support.ranks.rank_worlds import Worlds, start_from_seed, tiny_spec
from tests.support.ranks.world_checks import assert_one_curve, digests_of

from holdfast_workers.data.corpus import CorpusError
from holdfast_workers.data.token_cache import shard_file
from holdfast_workers.data.token_corpus import IGNORED
from holdfast_workers.data.token_set import read_shard
from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.spec import DataSpec, SourceSpec, TrainingSpec

SETS = (
    MadeSet("web", random_shards(1, [75, 40, 34, 12, 140, 3])),
    MadeSet("code", random_shards(2, [50, 9, 70])),
)
LENGTH = 32


def token_spec(mesh: Mapping[str, Any], **model: Any) -> TrainingSpec:
    data = DataSpec(
        sources=(SourceSpec(path="/web", weight=0.7), SourceSpec(path="/code", weight=0.3)),
        prepared=tuple(made.prepared() for made in SETS),
        shuffle_gb=4e-7,
    )
    return tiny_spec(mesh, corpus="unused", **model).model_copy(update={"data": data})


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    for made in SETS:
        made.put_into_cache(folder)
    return folder


@pytest.fixture(scope="module")
def token_worlds(cache: Path) -> Iterator[Worlds]:
    yield Worlds(cache)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "mesh",
    [
        {"dp_shard": 2},
        {"dp_replicate": 3},  # whose last pass has no micro-batch for two of the ranks
        {"cp": 2, "tp": 2},
        {"pp": 2},
    ],
    ids=str,
)
def test_every_mesh_divides_by_the_targets_of_all(
    token_worlds: Worlds, mesh: Mapping[str, int]
) -> None:
    assert_one_curve(token_worlds, token_spec({}), token_spec(mesh))


@pytest.mark.seconds
def test_a_run_that_goes_on_reads_what_the_undisturbed_one_read(
    token_worlds: Worlds, tmp_path: Path
) -> None:
    spec = token_spec({"dp_shard": 2})
    token_worlds.run(programs.undisturbed, spec, tmp_path)
    for digests in token_worlds.run(programs.resumed, spec, tmp_path, 3):
        expected = digests_of(token_worlds, spec)
        assert digests == {step: expected[step] for step in range(3, 7)}


def started(cache: Path) -> PretrainRecipe:
    recipe = PretrainRecipe(token_spec({}), cache)
    start_from_seed(recipe)
    return recipe


def test_a_step_counts_the_targets_that_there_are(cache: Path) -> None:
    """The loss of a short window is that of its tokens alone."""
    recipe = started(cache)
    task = recipe._require_task()
    shards = [tokens for made in SETS for tokens in _tokens_of(made)]
    windows = [
        tokens[start : start + LENGTH + 1]
        for tokens in shards
        for start in range(0, len(tokens) - 1, LENGTH)
    ]
    for step in range(1, 5):
        targets = recipe._read(step, 0).targets_of_step
        share = recipe._forward_backward(step, lambda name, step, micro_batch=0: None)
        recipe.abandon_step()
        read = task.samples_at(np.arange((step - 1) * 8, step * 8))
        alone = [torch.tensor(windows[sample]) for sample in read.tolist()]
        assert share.count == targets == sum(len(each) - 1 for each in alone)
        assert share.count < 8 * LENGTH
        with torch.no_grad():
            losses = [
                F.cross_entropy(recipe.model(each[None, :-1])[0].float(), each[1:], reduction="sum")
                for each in alone
            ]
        assert share.loss_sum == pytest.approx(float(sum(losses)), rel=1e-5)


def test_a_step_waits_for_a_shard_unless_the_attempt_is_over(cache: Path) -> None:
    class Over(Exception):
        pass

    recipe = started(cache)
    for made in SETS:
        for shard in made.shards:
            shard_file(cache, shard).unlink()

    def over() -> None:
        raise Over

    def restore() -> None:
        for made in SETS:
            made.put_into_cache(cache)

    try:
        recipe.leave_if_over = over
        with pytest.raises(Over):
            recipe._read(1, 0)
        recipe.leave_if_over = restore
        targets = recipe._read(1, 0).targets
        assert (targets != IGNORED).any()
    finally:
        restore()


def test_sources_that_are_not_prepared_are_refused(cache: Path) -> None:
    spec = token_spec({})
    data = spec.data.model_copy(update={"prepared": ()})
    recipe = PretrainRecipe(spec.model_copy(update={"data": data}), cache)
    with pytest.raises(CorpusError, match=r"not prepared: the server .* `holdfast data prepare`"):
        recipe.prepare()


def _tokens_of(made: MadeSet) -> list[list[int]]:
    return [read_shard(content, "").tokens.tolist() for content in made.contents.values()]
