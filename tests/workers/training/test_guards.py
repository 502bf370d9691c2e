"""Guards judge by agreed values and by what the state remembers: alike on all ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_workers.spec import GuardsSpec, TrainingSpec, faults
from holdfast_workers.training.guards import (
    MAX_RANGES,
    Decision,
    Kind,
    Place,
    Trip,
    judge,
    origin,
    told,
)
from holdfast_workers.training.skipped_windows import Ledger

PLACES = st.builds(
    Place,
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
) -> Trip | None:
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
    assert (trip.kind, trip.decision) == (Kind.NONFINITE, Decision.SKIP)
    assert (trip.window, trip.skipped, trip.back_to) == (2, (2, 3), None)


def test_a_rollback_passes_over_the_windows_since_the_step_it_goes_back_to() -> None:
    guards = spec(nonfinite={"policy": "rollback"}, rollback_steps=4)
    trip = look(guards, step=10, nonfinite=True, ledger=Ledger(((3, 5),)))
    assert trip is not None
    assert (trip.decision, trip.back_to) == (Decision.ROLLBACK, 6)
    assert trip.skipped == (8, 12)  # step 7 read window 8
    early = look(guards, step=2, nonfinite=True)
    assert early is not None
    assert (early.back_to, early.skipped) == (0, (0, 2))


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_too_much_skipped_data_stops_the_job_and_says_so(policy: str) -> None:
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
    assert stopped.decision is Decision.STOP
    assert stopped.skipped is None
    assert "guards.max_skips allows 4" in stopped.why
    assert Decision(policy) in decisions


def test_a_full_ledger_stops_the_job_and_says_so() -> None:
    full = Ledger.of([(3 * n, 3 * n + 1) for n in range(MAX_RANGES)])
    trip = look(spec(skip_span=1), step=10_000, nonfinite=True, ledger=full)
    assert trip is not None
    assert trip.decision is Decision.STOP
    assert "no room" in trip.why


@pytest.mark.parametrize("kind", [Kind.LOSS_SPIKE, Kind.GRAD_NORM_SPIKE])
@pytest.mark.parametrize("policy", ["report", "skip", "rollback", "stop"])
def test_a_spike_is_found_and_its_policy_decided(kind: Kind, policy: str) -> None:
    guards = spec(**{kind.value: {"policy": policy}})
    high = {"loss": 9.0} if kind is Kind.LOSS_SPIKE else {"grad_norm": 90.0}
    trip = look(guards, losses=noisy(), grad_norms=noisy(middle=1.0), **high)
    assert trip is not None
    assert (trip.kind, trip.decision) == (kind, Decision(policy))
    assert trip.limit is not None
    assert trip.value > trip.limit


def test_what_is_off_does_not_trip() -> None:
    guards = spec(loss_spike={"policy": "off"}, grad_norm_spike={"policy": "off"})
    assert look(guards, loss=1e9, grad_norm=1e9, losses=noisy(), grad_norms=noisy()) is None


def test_the_graver_of_two_decisions_counts() -> None:
    guards = spec(loss_spike={"policy": "report"}, grad_norm_spike={"policy": "skip"})
    trip = look(guards, loss=9.0, grad_norm=90.0, losses=noisy(), grad_norms=noisy(middle=1.0))
    assert trip is not None
    assert trip.decision is Decision.SKIP


def test_nothing_is_a_spike_in_the_warm_up_or_with_little_to_compare_with() -> None:
    stop = spec(loss_spike={"policy": "stop"}, warmup_steps=100)
    assert look(stop, step=100, loss=99.0, losses=noisy()) is None
    assert look(stop, step=101, loss=99.0, losses=noisy()) is not None
    assert look(stop, step=101, loss=99.0, losses=noisy(steps=15)) is None


def test_a_fall_is_no_spike() -> None:
    stop = spec(loss_spike={"policy": "stop"}, grad_norm_spike={"policy": "stop"})
    assert look(stop, loss=0.0, grad_norm=0.0, losses=noisy(), grad_norms=noisy()) is None


def test_values_that_never_differ_make_no_spike_of_a_small_difference() -> None:
    stop = spec(loss_spike={"policy": "stop"})
    assert look(stop, loss=2.1, losses=[2.0] * 64) is None
    assert look(stop, loss=3.0, losses=[2.0] * 64) is not None


def test_outliers_among_the_steps_before_do_not_hide_a_spike() -> None:
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


@given(places=st.lists(PLACES, max_size=8))
def test_it_began_where_it_was_met_first(places: list[Place]) -> None:
    begun, ranks = origin(places)
    if not places:
        assert (begun, ranks) == (None, ())
        return
    assert begun is not None
    assert begun in places
    earliest = min((one.micro_batch, one.order) for one in places)
    assert (begun.micro_batch, begun.order) == earliest
    alike = {one.rank for one in places if (one.micro_batch, one.order) == earliest}
    assert set(ranks) == alike


def test_what_is_told_is_json_without_nan() -> None:
    trip = look(spec(), loss=math.inf, grad_norm=math.nan, nonfinite=True)
    assert trip is not None
    report = told(trip, Place(3, 1, 7, "blocks.0", "output"), (2, 3))
    assert (report["loss"], report["grad_norm"], report["value"]) == (None, None, None)
    assert (report["ranks"], report["micro_batch"], report["layer"]) == ([2, 3], 1, "blocks.0")


def test_a_rollback_that_max_skips_forbids_is_a_fault_of_the_spec() -> None:
    guards = {"nonfinite": {"policy": "rollback"}, "rollback_steps": 9, "max_skips": 8}
    (found,) = faults(TrainingSpec.model_validate({"guards": guards}))
    assert found.path == "guards.rollback_steps"
