"""The ranks that must hold equal bits, and the report when they differ."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.ranks.rank_worlds import start_from_seed

from holdfast_workers.protocol import codec
from holdfast_workers.protocol.findings import ReplicaFinding
from holdfast_workers.recipes.parameter_checksum import ParameterChecksum
from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.state.replicas import (
    CorruptionFound,
    ReplicaComparison,
    ReplicaEquality,
    describe,
    payload_groups,
    ranks_by_shard,
    replica_equality,
)
from holdfast_workers.training.step_agreement import Agreed, Contribution, Record, fold

SHARE = Contribution(loss_sum=1.0, count=1, grad_sq=1.0, data_index=0, samples=1, sample_count=1)
MESH = {"dp_replicate": 2, "dp_shard": 2, "tp": 1}


def records(digests: str, *, step: int = 6, state_step: int = 5) -> list[Record]:
    """A record per letter; the letter stands for the digest of what replicas share."""
    return [
        Record(
            attempt=2,
            step=step,
            contribution=replace(SHARE, data_index=rank),
            state_step=state_step,
            state_digest=bytes([rank]) * 16,  # the rest of the state may differ
            shared_digest=letter.encode() * 16,
        )
        for rank, letter in enumerate(digests)
    ]


def test_ranks_that_differ_only_in_dp_replicate_are_compared() -> None:
    assert ranks_by_shard(MESH) == [(0, 2), (1, 3)]
    assert ReplicaComparison.of(MESH, 1, 1).groups == ((0, 2), (1, 3))
    assert ReplicaComparison.of({"dp_shard": 2, "tp": 2}, 1, 1).groups == ()
    assert ReplicaComparison.of(MESH, 0, 1).groups == ()


@pytest.mark.parametrize(
    ("job", "equality"),
    [
        ({}, ReplicaEquality.PAYLOAD),
        ({"recipe": "package.module:Mine"}, ReplicaEquality.SHARED),
        ({"function": "package.module:main"}, ReplicaEquality.SHARED),
        ({"script": "train.py", "program": {"context": True}}, ReplicaEquality.SHARED),
        ({"script": "train.py"}, ReplicaEquality.NOTHING),
        ({"command": "train"}, ReplicaEquality.NOTHING),
        ({"ray_train": "package.module:loop"}, ReplicaEquality.NOTHING),
    ],
)
def test_what_replicas_hold_alike_follows_from_the_kind_of_the_job(
    job: dict[str, Any], equality: ReplicaEquality
) -> None:
    spec = TrainingSpec.model_validate({**job, "parallel": {"dp_replicate": 2}})
    assert replica_equality(spec) is equality
    are_equal = equality is ReplicaEquality.PAYLOAD
    assert payload_groups(MESH, equality) == ([(0, 2), (1, 3)] if are_equal else singles(4))
    compared = equality is not ReplicaEquality.NOTHING
    groups = ReplicaComparison.of(MESH, 1, 1, equality=equality).groups
    assert groups == (((0, 2), (1, 3)) if compared else ())


def singles(ranks: int) -> list[tuple[int]]:
    return [(rank,) for rank in range(ranks)]


def test_digests_are_not_compared_where_equal_input_need_not_give_equal_bits() -> None:
    comparison = ReplicaComparison.of(MESH, 1, 1, repeatable=False)
    assert fold(records("abac"), comparison) == fold(records("abac"))
    received = records("abab")
    received[2] = replace(received[2], contribution=replace(received[2].contribution, changed=True))
    with pytest.raises(CorruptionFound, match="rank 2 changed by themselves"):
        fold(received, comparison)


def test_equal_replicas_fold_unchanged() -> None:
    assert fold(records("abab"), ReplicaComparison.of(MESH, 1, 1)) == fold(records("abab"))


def test_a_difference_is_detected_by_the_fold_with_ranks_and_step() -> None:
    with pytest.raises(CorruptionFound, match=r"rank 1 .* rank 3") as raised:
        fold(records("abac"), ReplicaComparison.of(MESH, 1, 1))
    finding = raised.value.finding
    assert (finding.attempt, finding.step, finding.bad_from) == (2, 5, 5)
    assert finding.groups == ((1, 3),)
    assert set(finding.digests) == {1, 3}


def test_a_step_without_a_digest_is_not_compared() -> None:
    fold(records("abac", state_step=-1), ReplicaComparison.of(MESH, 1, 1))


def test_a_rank_with_changed_parameters_is_reported_although_all_digests_agree() -> None:
    received = records("abab")
    contribution = replace(received[2].contribution, changed=True)
    received[2] = replace(received[2], contribution=contribution)
    received = [Record.unpack(record.pack()) for record in received]
    with pytest.raises(CorruptionFound, match="rank 2 changed by themselves") as raised:
        fold(received, ReplicaComparison.of(MESH, 1, 1))
    assert raised.value.finding.changed == (2,)
    assert raised.value.finding.bad_from == 6  # the state of step 5 is as it was computed


@given(st.integers(1, 7), st.integers(0, 7), st.integers(1, 60))
def test_all_steps_since_the_last_comparison_are_bad(
    every: int, digest_every: int, step: int
) -> None:
    comparison = ReplicaComparison.of(MESH, every, digest_every)
    with pytest.raises(CorruptionFound) as raised:
        comparison.check(1, step, ("a", "a", "a", "b"), (False,) * 4)
    bad_from = raised.value.finding.bad_from
    assert comparison.is_due(bad_from - 1, last=False)
    assert not any(comparison.is_due(later, last=False) for later in range(bad_from, step))


def test_a_finding_survives_json() -> None:
    finding = ReplicaFinding(2, 5, 4, ((0, 1),), {0: "a" * 32, 1: "b" * 32}, (1,))
    assert codec.restore(ReplicaFinding, json.loads(json.dumps(asdict(finding)))) == finding
    assert "rank 0 aaaaaaaa, rank 1 bbbbbbbb" in describe(finding)


@given(st.data())
def test_a_checksum_detects_any_single_bit(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    start = data.draw(st.integers(0, 1))
    tensors = [torch.randn(size + start)[start:] for size in sizes]
    checksum = ParameterChecksum(tensors)
    assert not checksum.has_changed()
    checksum.record()
    assert not checksum.has_changed()
    filled = [tensor for tensor in tensors if tensor.numel()]
    if filled:
        words = data.draw(st.sampled_from(filled)).view(torch.int32)
        word, bit = data.draw(st.integers(0, len(words) - 1)), data.draw(st.integers(0, 31))
        words[word] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
        assert checksum.has_changed()
        checksum.record()
    assert not checksum.has_changed()


def test_a_parameter_checksum_costs_little_of_a_step(tmp_path: Path) -> None:
    """The checksum is the only cost: the agreement carries the compared digests anyway."""
    (tmp_path / "text.txt").write_text("to be or not to be, " * 4000)
    model = {"dim": 64, "layers": 2, "sequence_length": 64}
    spec = TrainingSpec.model_validate(
        {"model": model, "data": {"source": str(tmp_path / "text.txt")}}
    )
    recipe = PretrainRecipe(spec, tmp_path)
    start_from_seed(recipe)

    def agree(share: Contribution) -> Agreed:
        return fold([Record(1, recipe.applied_step + 1, share, -1)])

    def step() -> None:
        recipe.train_step(recipe.applied_step + 1, agree, lambda _: None, lambda *_: None)

    checksum = ParameterChecksum([parameter.detach() for parameter in recipe.model.parameters()])

    def check() -> None:
        checksum.record()
        assert not checksum.has_changed()

    least = {call: min(_seconds(call) for _ in range(5)) for call in (step, check)}
    assert least[check] <= 0.02 * least[step], least


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
