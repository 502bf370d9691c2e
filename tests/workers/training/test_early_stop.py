"""The decision of `evaluate.stop`: a function of the results, which repeats after any restore."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.protocol.findings import EarlyStop
from holdfast_workers.spec import EarlyStopSpec, EvaluateSpec
from holdfast_workers.training.early_stop import EvaluationMemory, subject_of

EVERY = 10


def memory(patience: int | None) -> EvaluationMemory:
    stop = None if patience is None else EarlyStopSpec(patience=patience)
    return EvaluationMemory(EvaluateSpec(every_steps=EVERY, stop=stop))


def record(found: EvaluationMemory, number: int, value: float | None) -> None:
    found.record(
        number * EVERY, {} if value is None else {"eval_loss": value, "eval_perplexity": 1}
    )


def no_better(values: Sequence[float | None]) -> int:
    """How many evaluations at the end are no better than the best one before them."""
    finite = [math.inf if value is None else value for value in values]
    best = min(finite, default=math.inf)
    first = finite.index(best) if best < math.inf else -1
    return len(finite) - 1 - first


@given(
    values=st.lists(st.none() | st.sampled_from((1.0, 1.5, 2.0)) | st.floats(0, 3), max_size=12),
    patience=st.integers(1, 4),
    restored=st.sets(st.integers(0, 12)),
)
def test_training_stops_once_patience_is_used_up_whatever_is_restored_meanwhile(
    values: list[float | None], patience: int, restored: set[int]
) -> None:
    found = memory(patience)
    for number, value in enumerate(values, start=1):
        if number in restored:  # in another process
            (before,) = found.pieces(primary=True)
            found = memory(patience)
            (after,) = found.pieces(primary=True)
            after.tensor.copy_(before.tensor)
        record(found, number, value)
        since = no_better(values[:number])
        assert (found.early_stop() is not None) == (since >= patience)
        if since >= patience:
            return


def test_the_reason_names_the_best_evaluation() -> None:
    found = memory(2)
    for number, value in enumerate((3.0, 2.3125, 2.5, 2.3125), start=1):
        record(found, number, value)
    early = found.early_stop()
    assert early == EarlyStop("eval_loss", evaluations=2, best=2.3125, best_step=20)
    assert early.reason == "eval_loss has not improved on 2.312 of step 20 in 2 evaluations"
    found.reset()
    record(found, 1, None)
    record(found, 2, None)
    early = found.early_stop()
    assert early is not None
    assert early.reason == "eval_loss was not finite in 2 evaluations"


def test_an_evaluation_of_the_last_step_alone_does_not_count() -> None:
    """A longer run, whose state this is, does not have it."""
    found = memory(1)
    record(found, 1, 2.0)
    found.record(EVERY + 1, {"eval_loss": 3.0})
    assert found.early_stop() is None


def test_without_a_stop_the_state_never_changes() -> None:
    found = memory(None)
    (piece,) = found.pieces(primary=True)
    before = piece.tensor.clone()
    for number in range(1, 9):
        record(found, number, 2.0)
    assert torch.equal(piece.tensor, before)
    assert found.early_stop() is None


@pytest.mark.parametrize(
    "other",
    [
        subject_of(EvaluateSpec(stop=EarlyStopSpec(patience=2)), "other documents", 100),
        subject_of(EvaluateSpec(stop=EarlyStopSpec(patience=2)), "documents", 50),
        subject_of(
            EvaluateSpec(stop=EarlyStopSpec(metric="eval_perplexity", patience=2)), "documents", 100
        ),
        subject_of(
            EvaluateSpec(weights="average", stop=EarlyStopSpec(patience=2)), "documents", 100
        ),
    ],
)
def test_values_of_another_subject_are_forgotten(other: int) -> None:
    """`init_from` takes the memory over, whatever its job evaluated."""
    found = memory(2)
    found.subject = subject_of(EvaluateSpec(stop=EarlyStopSpec(patience=2)), "documents", 100)
    for number in range(1, 4):
        record(found, number, 1.0)
    assert found.early_stop() is not None
    found.subject = other
    assert found.early_stop() is None
    record(found, 4, 2.0)
    record(found, 5, 2.0)
    assert found.early_stop() is None
    record(found, 6, 3.0)
    assert found.early_stop() == EarlyStop("eval_loss", 2, 2.0, 40)
