"""Guards decide from agreed values and the history in the state, alike on all ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast_workers.protocol.findings import TripReport
from holdfast_workers.spec import GuardsSpec, TrainingSpec, find_faults
from holdfast_workers.training.guards import (
    MAX_RANGES,
    GuardAction,
    GuardKind,
    NonfiniteOrigin,
    find_origin,
    judge,
    trip_report,
)
from holdfast_workers.training.nonfinite_tracing import NonfiniteTracer
from holdfast_workers.training.skipped_windows import Ledger

ORIGINS = st.builds(
    NonfiniteOrigin,
    rank=st.integers(0, 7),
    micro_batch=st.integers(0, 3),
    order=st.integers(1, 40),
    layer=st.just("block"),
    what=st.just("output"),
)


def spec(**fields: object) -> GuardsSpec:
    return GuardsSpec.model_validate(fields)


def look(
    guards: GuardsSpec,
    step: int = 200,
    loss: float = 2.0,
    grad_norm: float = 1.0,
    *,
    nonfinite: bool = False,
    losses: Sequence[float] = (),
    grad_norms: Sequence[float] = (),
    ledger: Ledger | None = None,
) -> TripReport | None:
    return judge(
        guards,
        step=step,
        loss=loss,
        grad_norm=grad_norm,
        nonfinite=nonfinite,
        losses=losses,
        grad_norms=grad_norms,
        ledger=ledger or Ledger(),
    )


def noisy(seed: int = 1, steps: int = 64, middle: float = 2.0) -> list[float]:
    draw = random.Random(seed)
    return [middle + draw.gauss(0, 0.1) for _ in range(steps)]


def test_a_step_that_is_not_finite_is_skipped_with_its_window() -> None:
    trip = look(spec(), step=1, loss=math.nan, nonfinite=True, ledger=Ledger(((0, 2),)))
    assert trip is not None
    assert (trip.kind, trip.decision) == (GuardKind.NONFINITE, GuardAction.SKIP)
    assert (trip.window, trip.skipped, trip.back_to) == (2, (2, 3), None)


def test_a_rollback_skips_the_windows_since_its_target_step() -> None:
    guards = spec(nonfinite={"policy": "rollback"}, rollback_steps=4)
    trip = look(guards, step=10, nonfinite=True, ledger=Ledger(((3, 5),)))
    assert trip is not None
    assert (trip.decision, trip.back_to) == (GuardAction.ROLLBACK, 6)
    assert trip.skipped == (8, 12)  # step 7 read window 8
    early = look(guards, step=2, nonfinite=True)
    assert early is not None
    assert (early.back_to, early.skipped) == (0, (0, 2))


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_too_much_skipped_data_stops_the_job_with_the_reason(policy: str) -> None:
    guards = spec(nonfinite={"policy": policy}, max_skips=4, skip_span=50)
    ledger = Ledger(((150, 153),))
    decisions = [
        trip.decision
        for step in (190, 199)
        if (trip := look(guards, step=step, nonfinite=True, ledger=ledger)) is not None
    ]
    skipped_more = Ledger(((150, 154),))
    stopped = look(guards, step=190, nonfinite=True, ledger=skipped_more)
    assert stopped is not None
    assert stopped.decision is GuardAction.STOP
    assert stopped.skipped is None
    assert "guards.max_skips allows 4" in stopped.why
    assert GuardAction(policy) in decisions


def test_a_full_ledger_stops_the_job_with_the_reason() -> None:
    full = Ledger.of([(3 * n, 3 * n + 1) for n in range(MAX_RANGES)])
    trip = look(spec(skip_span=1), step=10_000, nonfinite=True, ledger=full)
    assert trip is not None
    assert trip.decision is GuardAction.STOP
    assert "no room" in trip.why


@pytest.mark.parametrize("kind", [GuardKind.LOSS_SPIKE, GuardKind.GRAD_NORM_SPIKE])
@pytest.mark.parametrize("policy", ["report", "skip", "rollback", "stop"])
def test_a_spike_is_found_and_its_policy_applied(kind: GuardKind, policy: str) -> None:
    guards = spec(**{kind.value: {"policy": policy}})
    high: dict[str, Any] = {"loss": 9.0} if kind is GuardKind.LOSS_SPIKE else {"grad_norm": 90.0}
    trip = look(guards, losses=noisy(), grad_norms=noisy(middle=1.0), **high)
    assert trip is not None
    assert (trip.kind, trip.decision) == (kind, GuardAction(policy))
    assert trip.limit is not None and trip.value is not None
    assert trip.value > trip.limit


def test_a_disabled_guard_does_not_trip() -> None:
    guards = spec(loss_spike={"policy": "off"}, grad_norm_spike={"policy": "off"})
    assert look(guards, loss=1e9, grad_norm=1e9, losses=noisy(), grad_norms=noisy()) is None


def test_the_more_severe_of_two_actions_counts() -> None:
    guards = spec(loss_spike={"policy": "report"}, grad_norm_spike={"policy": "skip"})
    trip = look(guards, loss=9.0, grad_norm=90.0, losses=noisy(), grad_norms=noisy(middle=1.0))
    assert trip is not None
    assert trip.decision is GuardAction.SKIP


def test_no_value_is_a_spike_during_warm_up_or_with_a_short_history() -> None:
    stop = spec(loss_spike={"policy": "stop"}, warmup_steps=100)
    assert look(stop, step=100, loss=99.0, losses=noisy()) is None
    assert look(stop, step=101, loss=99.0, losses=noisy()) is not None
    assert look(stop, step=101, loss=99.0, losses=noisy(steps=15)) is None


def test_a_decrease_is_not_a_spike() -> None:
    stop = spec(loss_spike={"policy": "stop"}, grad_norm_spike={"policy": "stop"})
    assert look(stop, loss=0.0, grad_norm=0.0, losses=noisy(), grad_norms=noisy()) is None


def test_a_small_difference_from_constant_values_is_not_a_spike() -> None:
    stop = spec(loss_spike={"policy": "stop"})
    assert look(stop, loss=2.1, losses=[2.0] * 64) is None
    assert look(stop, loss=3.0, losses=[2.0] * 64) is not None


def test_a_loss_that_stays_at_zero_is_not_a_spike() -> None:
    """Its limit is zero, too: a value at its limit does not exceed it."""
    stop = spec(loss_spike={"policy": "stop"})
    assert look(stop, loss=0.0, losses=[0.0] * 64) is None
    assert look(stop, loss=1e-9, losses=[0.0] * 64) is not None


def test_outliers_in_the_history_do_not_hide_a_spike() -> None:
    stop = spec(loss_spike={"policy": "stop"})
    losses = noisy()
    losses[::3] = [50.0] * len(losses[::3])
    assert look(stop, loss=60.0, losses=losses) is not None


def test_one_excursion_is_reported_once() -> None:
    report = spec(loss_spike={"policy": "report"})
    before = [*noisy(), 9.0]
    assert look(report, loss=9.0, losses=before) is None
    assert look(report, loss=9.0, losses=[*before, 2.0]) is not None
    assert look(spec(loss_spike={"policy": "skip"}), loss=9.0, losses=before) is not None


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_healthy_training_trips_nothing(seed: int) -> None:
    draw = random.Random(seed)
    losses: list[float] = []
    norms: list[float] = []
    for step in range(1, 400):
        loss = 10 / (1 + step / 50) + draw.gauss(0, 0.05)
        norm = math.exp(draw.gauss(0, 0.3))
        trip = look(
            spec(warmup_steps=20), step, loss, norm, losses=losses[-65:], grad_norms=norms[-65:]
        )
        assert trip is None
        losses.append(loss)
        norms.append(norm)


@given(places=st.lists(ORIGINS, max_size=8))
def test_the_origin_is_the_earliest_place(places: list[NonfiniteOrigin]) -> None:
    origin, ranks = find_origin(places)
    if not places:
        assert (origin, ranks) == (None, ())
        return
    assert origin is not None
    assert origin in places
    earliest = min((place.micro_batch, place.order) for place in places)
    assert (origin.micro_batch, origin.order) == earliest
    expected = {place.rank for place in places if (place.micro_batch, place.order) == earliest}
    assert set(ranks) == expected


def test_an_origin_has_its_place_within_its_micro_batch() -> None:
    tracer = NonfiniteTracer(nn.Identity(), rank=3)
    tracer.start_micro_batch(0)
    tracer.check([torch.ones(2)], "first", "output")
    tracer.start_micro_batch(1)
    tracer.check([torch.tensor([1.0, math.nan])], "first", "output")
    tracer.check([torch.tensor([math.inf])], "second", "output")
    assert tracer.origin == NonfiniteOrigin(3, 1, 1, "first", "output")


def test_a_trip_report_is_json_without_nan() -> None:
    trip = look(spec(), loss=math.inf, grad_norm=math.nan, nonfinite=True)
    assert trip is not None
    report = trip_report(trip, NonfiniteOrigin(3, 1, 7, "blocks.0", "output"), (2, 3))
    assert (report.loss, report.grad_norm, report.value) == (None, None, None)
    assert (report.ranks, report.micro_batch, report.layer) == ((2, 3), 1, "blocks.0")


def test_a_rollback_longer_than_max_skips_is_a_fault_of_the_spec() -> None:
    guards = {"nonfinite": {"policy": "rollback"}, "rollback_steps": 9, "max_skips": 8}
    (found,) = find_faults(TrainingSpec.model_validate({"guards": guards}))
    assert found.path == "guards.rollback_steps"
