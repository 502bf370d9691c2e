"""Each schedule follows its formula, for any length, warm-up and floor."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.optim.schedule import learning_rate, peak_rate
from holdfast_workers.spec import TrainSpec

STEPS = st.integers(2, 500)
FLOORS = st.floats(0, 1)
NAMES = ("cosine", "linear", "constant", "wsd")
SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda t: 1 - t,
    "sqrt": lambda t: (1 - t) ** 0.5,
    "1-sqrt": lambda t: 1 - t**0.5,
}


def train_of(steps: int, warmup: int, floor: float, name: str, **more: Any) -> TrainSpec:
    schedule = {"name": name, "warmup_steps": warmup, "final_lr_fraction": floor, **more}
    return TrainSpec.model_validate(
        {"steps": steps, "optimizer": {"lr": 2.0}, "schedule": schedule}
    )


def rates(train: TrainSpec) -> list[float]:
    return [learning_rate(train, step) for step in range(1, train.last_step + 1)]


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = NAMES) -> TrainSpec:
    steps = draw(STEPS)
    warmup = draw(st.integers(0, steps - 1))
    name = draw(st.sampled_from(names))
    more: dict[str, Any] = {}
    if name == "wsd":
        more["decay"] = draw(st.sampled_from(sorted(SHAPES)))
        most = (steps - warmup) / steps
        more["decay_share"] = draw(st.floats(1e-3, 1)) * most
    return train_of(steps, warmup, draw(FLOORS), name, **more)


@given(schedules())
def test_the_rate_rises_to_its_peak_and_never_again(train: TrainSpec) -> None:
    warmup, found = train.schedule.warmup_steps, rates(train)
    for step in range(1, warmup + 1):
        assert found[step - 1] == pytest.approx(2.0 * step / warmup)
    assert all(before >= after for before, after in pairwise(found[max(0, warmup - 1) :]))
    assert all(0 <= rate <= 2.0 for rate in found)


@given(schedules(("cosine", "linear", "wsd")))
def test_the_last_rate_is_the_floor(train: TrainSpec) -> None:
    assert rates(train)[-1] == pytest.approx(2.0 * train.schedule.final_lr_fraction, abs=1e-12)


@given(schedules(("cosine", "linear")))
def test_cosine_and_line_follow_their_formulas(train: TrainSpec) -> None:
    schedule = train.schedule
    low, high, first = 2.0 * schedule.final_lr_fraction, 2.0, schedule.warmup_steps
    for step in range(first + 1, train.last_step + 1):
        t = (step - first) / (train.last_step - first)
        left = 1 - t if schedule.name == "linear" else (1 + math.cos(math.pi * t)) / 2
        assert learning_rate(train, step) == pytest.approx(low + (high - low) * left)


@given(schedules(("wsd",)))
def test_wsd_is_constant_and_then_decays_in_its_shape(train: TrainSpec) -> None:
    schedule, last = train.schedule, train.last_step
    low, decaying = 2.0 * schedule.final_lr_fraction, schedule.decay_steps(last)
    shape = SHAPES[schedule.decay or ""]
    for step in range(schedule.warmup_steps + 1, last + 1):
        t = max(0.0, (step - (last - decaying)) / decaying)
        expected = low + (2.0 - low) * shape(min(1.0, t))
        assert learning_rate(train, step) == pytest.approx(expected, abs=1e-12)


@given(schedules(("constant",)))
def test_a_constant_rate_stays_at_its_peak(train: TrainSpec) -> None:
    assert set(rates(train)[train.schedule.warmup_steps :]) == {2.0}


def test_the_rate_is_scaled_with_the_batch_only_if_asked() -> None:
    plain = TrainSpec.model_validate({"global_batch": 512, "optimizer": {"lr": 0.5}})
    scaled = TrainSpec.model_validate(
        {"global_batch": 512, "optimizer": {"lr": 0.5, "lr_for_batch": 256}}
    )
    assert (peak_rate(plain), peak_rate(scaled)) == (0.5, 1.0)
    for step in (1, 20, 21, 300):
        assert learning_rate(scaled, step) == pytest.approx(2 * learning_rate(plain, step))
