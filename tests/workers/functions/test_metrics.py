"""Numbers of a user's own: named, averaged over the ranks, and beside the loss in each row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.workers.functions.test_function import STEPS, prepared, ran

from holdfast_workers.functions import FunctionError
from holdfast_workers.functions.step_metrics import MOST, OwnMetrics
from holdfast_workers.training.step_agreement import fold_own, own_packed


def test_they_are_in_the_row_of_their_step_and_change_no_bit_of_the_state() -> None:
    telling, _ = ran(prepared("telling"))
    silent, _ = ran(prepared("telling", config={"silent": True}))
    own = [row.own for row in telling.rows]
    assert [sorted(one) for one in own] == [["error"], ["error", "val/acc"]] * 4 + [["error"]]
    assert [one["val/acc"] for one in own[1::2]] == [2.0, 4.0, 6.0, 8.0]
    assert all(row.own == {} for row in silent.rows)
    assert telling.digests == silent.digests
    assert len(telling.rows) == STEPS


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": 1.0}, "measured by Holdfast itself"),
        ({"": 1.0}, "is no name for a metric"),
        ({"a b": 1.0}, "is no name for a metric"),
        ({"x" * 65: 1.0}, "is no name for a metric"),
        ({3: 1.0}, "is no name for a metric"),
        ({"text": "1.0"}, "the metric 'text' is a str"),
        ({"many": torch.ones(2)}, "the metric 'many' is a Tensor"),
        ({f"acc_{n}": 1.0 for n in range(MOST + 1)}, "more than 32 different names"),
    ],
)
def test_what_cannot_be_a_series_is_named(given: dict[str, float], message: str) -> None:
    with pytest.raises(FunctionError, match=message):
        OwnMetrics().checked(given)


def test_numbers_of_every_kind_are_taken_and_what_is_not_finite_is_left_out() -> None:
    given = {
        "a": 1,
        "b": True,
        "c": np.float32(0.5),
        "d": torch.tensor([2.0], requires_grad=True),
        "e": math.nan,
        "f": -math.inf,
    }
    found = OwnMetrics().checked(given)
    assert found == {"a": 1.0, "b": 1.0, "c": 0.5, "d": 2.0}
    assert all(type(value) is float for value in found.values())


def test_names_are_counted_over_all_steps() -> None:
    metrics = OwnMetrics()
    for n in range(MOST):
        metrics.checked({f"acc_{n}": 1.0})
        metrics.checked({"acc_0": 1.0})
    with pytest.raises(FunctionError, match="more than"):
        metrics.checked({"one_more": 1.0})


def test_the_mean_is_over_the_ranks_that_bring_it() -> None:
    of_ranks: list[dict[str, float]] = [{"all": 0.0}, {}, {"all": 3.0, "last": 7.0}, {"all": 3.0}]
    longest = max(len(own_packed(own)) for own in of_ranks)
    packed = [own_packed(own).ljust(longest) for own in of_ranks]
    assert fold_own(packed) == {"all": 2.0, "last": 7.0}
    assert fold_own([own_packed({"vast": 1.7e308})] * 3) == {"vast": pytest.approx(1.7e308)}
