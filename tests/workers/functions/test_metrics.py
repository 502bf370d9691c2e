"""The user's metrics: named, averaged over the ranks, and beside the loss in each row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.workers.functions.test_function import STEPS, prepared, ran

from holdfast_workers.functions import FunctionError
from holdfast_workers.functions.step_metrics import UserMetrics
from holdfast_workers.program_metrics.metric_names import MAX_NAMES
from holdfast_workers.protocol.metrics import METRICS
from holdfast_workers.training.step_agreement import fold_user_metrics, pack_user_metrics


def test_metrics_are_in_the_row_of_their_step_and_change_no_bit_of_the_state() -> None:
    reporting, _ = ran(prepared("reports_metrics"))
    silent, _ = ran(prepared("reports_metrics", config={"silent": True}))
    metrics = [row.own for row in reporting.rows]
    assert [sorted(of_step) for of_step in metrics] == [
        *([["error"], ["error", "val/acc"]] * 4),
        ["error"],
    ]
    assert [of_step["val/acc"] for of_step in metrics[1::2]] == [2.0, 4.0, 6.0, 8.0]
    assert all(row.own == {} for row in silent.rows)
    assert reporting.digests == silent.digests
    assert len(reporting.rows) == STEPS


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({name: 1.0}, "measured by Holdfast itself") for name in (*METRICS, "at", "compute_s")),
        ({"": 1.0}, "is not a valid metric name"),
        ({"a b": 1.0}, "is not a valid metric name"),
        ({"x" * 65: 1.0}, "is not a valid metric name"),
        ({3: 1.0}, "is not a valid metric name"),
        ({"text": "1.0"}, "the metric 'text' is a str"),
        ({"many": torch.ones(2)}, "the metric 'many' is a Tensor"),
        ({f"acc_{n}": 1.0 for n in range(MAX_NAMES + 1)}, "more than 32 different names"),
    ],
)
def test_an_invalid_metric_is_named(given: dict[str, float], message: str) -> None:
    with pytest.raises(FunctionError, match=message):
        UserMetrics().validated(given)


def test_numbers_of_every_type_are_accepted_and_nonfinite_ones_left_out() -> None:
    given: dict[str, Any] = {
        "a": 1,
        "b": True,
        "c": np.float32(0.5),
        "d": torch.tensor([2.0], requires_grad=True),
        "e": math.nan,
        "f": -math.inf,
    }
    metrics = UserMetrics().validated(given)
    assert metrics == {"a": 1.0, "b": 1.0, "c": 0.5, "d": 2.0}
    assert all(type(value) is float for value in metrics.values())


def test_names_are_counted_over_all_steps() -> None:
    metrics = UserMetrics()
    for n in range(MAX_NAMES):
        metrics.validated({f"acc_{n}": 1.0})
        metrics.validated({"acc_0": 1.0})
    with pytest.raises(FunctionError, match="more than"):
        metrics.validated({"one_more": 1.0})


def test_the_mean_is_over_the_ranks_that_contribute() -> None:
    of_ranks: list[dict[str, float]] = [{"all": 0.0}, {}, {"all": 3.0, "last": 7.0}, {"all": 3.0}]
    longest = max(len(pack_user_metrics(own)) for own in of_ranks)
    packed = [pack_user_metrics(own).ljust(longest) for own in of_ranks]
    assert fold_user_metrics(packed) == {"all": 2.0, "last": 7.0}
    assert fold_user_metrics([pack_user_metrics({"vast": 1.7e308})] * 3) == {
        "vast": pytest.approx(1.7e308)
    }
