"""The agreement on an evaluation: a pure fold of one record per rank."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.training.evaluation import (
    Evaluated,
    EvaluationRecord,
    EvaluationShare,
    MetricsDiffer,
    fold_evaluation,
    fold_sums,
)
from holdfast_workers.training.step_agreement import Disagreement

SHARES = st.lists(
    st.tuples(st.floats(0, 1e6), st.integers(0, 1000), st.integers(0, 2**64 - 1)),
    min_size=1,
    max_size=5,
).filter(lambda shares: any(count for _, count, _ in shares))


def records_of(
    shares: Sequence[tuple[float, int, int]], targets: int | None = None
) -> list[EvaluationRecord]:
    whole = sum(count for _, count, _ in shares) if targets is None else targets
    return [
        EvaluationRecord(1, 20, EvaluationShare(loss, count, index, digest, whole, 77))
        for index, (loss, count, digest) in enumerate(shares)
    ]


@given(SHARES)
def test_the_loss_is_the_mean_over_all_targets(shares: list[tuple[float, int, int]]) -> None:
    found = fold_evaluation(records_of(shares))
    count = sum(count for _, count, _ in shares)
    assert found.loss == pytest.approx(sum(loss for loss, _, _ in shares) / count)
    assert int(found.samples, 16) == sum(digest for _, _, digest in shares) % 2**64


@given(SHARES)
def test_a_record_is_unpacked_as_it_was(shares: list[tuple[float, int, int]]) -> None:
    records = records_of(shares)
    assert [EvaluationRecord.unpack(each.pack()) for each in records] == records


def test_samples_that_peers_share_count_once() -> None:
    first, second = records_of([(6.0, 3, 5), (0.0, 0, 5)])
    peer = replace(second, share=replace(second.share, data_index=0))
    assert fold_evaluation([first, peer]) == Evaluated(2.0, f"{5:016x}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 21}, "rank 1 evaluates step 21 of attempt 1; rank 0 step 20"),
        ({"attempt": 2}, "rank 1 evaluates step 20 of attempt 2"),
        ({"documents": 78}, "rank 1 evaluates other documents"),
        ({"data_index": 0, "samples": 6}, "other samples than its peer with data index 0"),
        ({"count": 2}, "the ranks evaluated 5 targets, and the samples have 6"),
    ],
)
def test_ranks_that_differ_have_no_result(changes: dict[str, Any], message: str) -> None:
    first, second = records_of([(6.0, 3, 5), (6.0, 3, 5)])
    of_share = {name: value for name, value in changes.items() if hasattr(second.share, name)}
    others = {name: value for name, value in changes.items() if name not in of_share}
    second = replace(second, share=replace(second.share, **of_share), **others)
    with pytest.raises(Disagreement, match=message):
        fold_evaluation([first, second])


def test_values_that_are_not_finite_are_no_metrics() -> None:
    assert Evaluated(math.nan, "").metrics == {}
    assert Evaluated(math.nan, "").not_finite == ["eval_loss", "eval_perplexity"]
    assert Evaluated(800.0, "").metrics == {"eval_loss": 800.0}
    assert Evaluated(800.0, "", {"eval_a": math.inf}).not_finite == ["eval_perplexity", "eval_a"]
    assert Evaluated(2.0, "").metrics == {"eval_loss": 2.0, "eval_perplexity": math.exp(2.0)}


@given(st.lists(st.none() | st.integers(0, 1000), min_size=1, max_size=5).filter(any))
def test_a_metric_of_a_function_is_the_sum_of_the_ranks_that_know_it_by_target(
    sums: list[int | None],
) -> None:
    packed = [b"  " if each is None else json.dumps({"eval_right": each}).encode() for each in sums]
    assert fold_sums(packed, 50) == {"eval_right": sum(filter(None, sums)) / 50}


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (
            [b"", b'{"a": 1.0}', b'{"b": 1.0}'],
            "returned \\['b'\\] on rank 2, and \\['a'\\] on rank 1",
        ),
        ([b'{"a": 1.0}', b"{}", b"  "], "returned \\[\\] on rank 1, and \\['a'\\] on rank 0"),
    ],
)
def test_a_function_returns_the_same_names_on_all_ranks(packed: list[bytes], message: str) -> None:
    with pytest.raises(MetricsDiffer, match=message):
        fold_sums(packed, 50)
