"""Which ranks must hold the same bits, and what is said when they do not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.ranks.rank_worlds import begin

from holdfast_workers.recipes.parameter_checksum import Seal
from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.state.replicas import Comparison, CorruptionFound, Finding, in_words, shards
from holdfast_workers.training.step_agreement import Agreed, Contribution, Record, fold

SHARE = Contribution(loss_sum=1.0, count=1, grad_sq=1.0, data_index=0, samples=1, sample_count=1)
MESH = {"dp_replicate": 2, "dp_shard": 2, "tp": 1}


def records(digests: str, *, step: int = 6, state_step: int = 5) -> list[Record]:
    """A record for each letter, which stands for the rank's digest."""
    return [
        Record(2, step, replace(SHARE, data_index=rank), state_step, letter.encode() * 16)
        for rank, letter in enumerate(digests)
    ]


def test_ranks_that_differ_in_dp_replicate_alone_are_compared() -> None:
    assert shards(MESH) == [(0, 2), (1, 3)]
    assert Comparison.of(MESH, 1, 1).groups == ((0, 2), (1, 3))
    assert Comparison.of({"dp_shard": 2, "tp": 2}, 1, 1).groups == ()
    assert Comparison.of(MESH, 0, 1).groups == ()


def test_replicas_that_agree_fold_as_ever() -> None:
    assert fold(records("abab"), Comparison.of(MESH, 1, 1)) == fold(records("abab"))


def test_a_difference_is_found_by_the_fold_with_who_and_since_when() -> None:
    with pytest.raises(CorruptionFound, match=r"rank 1 .* rank 3") as raised:
        fold(records("abac"), Comparison.of(MESH, 1, 1))
    finding = raised.value.finding
    assert (finding.attempt, finding.step, finding.bad_from) == (2, 5, 5)
    assert finding.groups == ((1, 3),)
    assert set(finding.digests) == {1, 3}


def test_a_step_without_a_digest_is_not_compared() -> None:
    fold(records("abac", state_step=-1), Comparison.of(MESH, 1, 1))


def test_a_rank_whose_parameters_changed_is_heard_even_if_all_digests_agree() -> None:
    told = records("abab")
    told[2] = replace(told[2], contribution=replace(told[2].contribution, changed=True))
    told = [Record.unpack(one.pack()) for one in told]
    with pytest.raises(CorruptionFound, match="rank 2 changed by themselves") as raised:
        fold(told, Comparison.of(MESH, 1, 1))
    assert raised.value.finding.changed == (2,)
    assert raised.value.finding.bad_from == 6  # the state of step 5 is as it was computed


@given(st.integers(1, 7), st.integers(0, 7), st.integers(1, 60))
def test_what_was_computed_since_the_last_comparison_is_bad(
    every: int, digest_every: int, step: int
) -> None:
    comparison = Comparison.of(MESH, every, digest_every)
    with pytest.raises(CorruptionFound) as raised:
        comparison.check(1, step, ("a", "a", "a", "b"), (False,) * 4)
    bad_from = raised.value.finding.bad_from
    assert comparison.is_due(bad_from - 1, last=False)
    assert not any(comparison.is_due(one, last=False) for one in range(bad_from, step))


def test_a_finding_survives_json() -> None:
    finding = Finding(2, 5, 4, ((0, 1),), {0: "a" * 32, 1: "b" * 32}, (1,))
    assert Finding.from_data(json.loads(json.dumps(finding.data()))) == finding
    assert "rank 0 aaaaaaaa, rank 1 bbbbbbbb" in in_words(finding)


@given(st.data())
def test_a_seal_tells_any_single_bit(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    start = data.draw(st.integers(0, 1))
    tensors = [torch.randn(size + start)[start:] for size in sizes]
    seal = Seal(tensors)
    assert not seal.is_broken()
    seal.close()
    assert not seal.is_broken()
    filled = [tensor for tensor in tensors if tensor.numel()]
    if filled:
        words = data.draw(st.sampled_from(filled)).view(torch.int32)
        word, bit = data.draw(st.integers(0, len(words) - 1)), data.draw(st.integers(0, 31))
        words[word] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
        assert seal.is_broken()
        seal.close()
    assert not seal.is_broken()


def test_looking_at_the_parameters_costs_little_of_a_step(tmp_path: Path) -> None:
    """Beside it nothing is spent: the digests that are compared ride in the agreement anyway."""
    (tmp_path / "text.txt").write_text("to be or not to be, " * 4000)
    model = {"dim": 64, "layers": 2, "sequence_length": 64}
    spec = TrainingSpec.model_validate(
        {"model": model, "data": {"source": str(tmp_path / "text.txt")}}
    )
    recipe = PretrainRecipe(spec, tmp_path)
    begin(recipe)

    def agree(share: Contribution) -> Agreed:
        return fold([Record(1, recipe.applied_step + 1, share, -1)])

    def step() -> None:
        recipe.train_step(recipe.applied_step + 1, agree, lambda _: None, lambda *_: None)

    seal = Seal([parameter.detach() for parameter in recipe.model.parameters()])

    def look() -> None:
        seal.close()
        assert not seal.is_broken()

    least = {each: min(_seconds(each) for _ in range(5)) for each in (step, look)}
    assert least[look] <= 0.02 * least[step], least


def _seconds(what: Callable[[], None]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began
