"""Intervals chosen from costs and failures: properties, and a comparison with simulated runs."""

from __future__ import annotations

import random
from dataclasses import replace
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.service import fake_cluster

from holdfast_service.policy.checkpoint_intervals import (
    MAX_LOST_S,
    AutoTier,
    SaveCosts,
    choose_interval,
    mean_time_between_failures_s,
    optimum_s,
)
from holdfast_workers.protocol.messages import StepRow

SECONDS = st.floats(1e-4, 1e3)
MTBFS = st.floats(60.0, 1e8)
STEPS = st.floats(1e-3, 60.0)
TARGETS = st.sampled_from((0.001, 0.01, 0.05, 0.5, 1.0))
TIERS = st.sampled_from(AutoTier)


@given(SECONDS, MTBFS, STEPS, TARGETS, TIERS)
def test_both_bounds_hold_and_the_overhead_bound_has_priority(
    cost_s: float, mtbf_s: float, step_s: float, target: float, tier: AutoTier
) -> None:
    chosen = choose_interval(tier, cost_s, mtbf_s, step_s, target)
    between_s = chosen.every_steps * step_s
    assert chosen.every_steps >= 1
    assert cost_s / between_s <= target * (1 + 1e-9)
    assert between_s <= max(MAX_LOST_S, cost_s / target + step_s) * (1 + 1e-9) + step_s


@given(SECONDS, SECONDS, MTBFS, MTBFS, STEPS, TARGETS, TIERS)
def test_costlier_saves_and_rarer_failures_never_make_saves_more_frequent(
    one_s: float, two_s: float, early_s: float, late_s: float, step_s: float, target: float,
    tier: AutoTier,
) -> None:  # fmt: skip
    cheap, dear = sorted((one_s, two_s))
    soon, rare = sorted((early_s, late_s))
    usual = choose_interval(tier, cheap, soon, step_s, target).every_steps
    assert choose_interval(tier, dear, soon, step_s, target).every_steps >= usual
    assert choose_interval(tier, cheap, rare, step_s, target).every_steps >= usual


def test_the_optimum_equals_youngs_formula_for_cheap_saves() -> None:
    assert optimum_s(1.0, 1e6) == pytest.approx(sqrt(2e6), rel=0.001)
    assert optimum_s(300.0, 100.0) == 100.0


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(0.5, 500.0), (5.0, 1000.0), (20.0, 2000.0)])
def test_lost_time_is_within_five_percent_of_the_best_simulated_interval(
    cost_s: float, mtbf_s: float
) -> None:
    """Simulates a run with failures at random times for every interval."""
    chosen = choose_interval(
        AutoTier.MEMORY, cost_s, mtbf_s, step_s=1.0, overhead_target=1.0
    ).every_steps
    tried = {every: _lost(every, cost_s, mtbf_s) for every in range(5, 600, 5)}
    assert _lost(chosen, cost_s, mtbf_s) <= 1.05 * min(tried.values())


def _lost(every: int, cost_s: float, mtbf_s: float) -> float:
    """Seconds of saves and of repeated work in a run with many failures, always the same."""
    failures = random.Random(1)
    lost_s = 0.0
    for _ in range(3000):
        alive_s = failures.expovariate(1 / mtbf_s)
        saves = int(alive_s // (every + cost_s))
        lost_s += saves * cost_s + (alive_s - saves * (every + cost_s))
    return lost_s


def test_a_few_failures_change_the_estimate_little_and_many_determine_it() -> None:
    def mtbf(failures: int, trained_s: float) -> float:
        return mean_time_between_failures_s(AutoTier.MEMORY, failures, trained_s, nodes=4)

    before = mtbf(0, 0.0)
    assert before == 30 * 86400 / 4
    assert mtbf(1, 60.0) == pytest.approx(before / 2, rel=0.01)
    month = 30 * 86400.0
    assert mtbf(3600, 12 * month) == pytest.approx(month / 300, rel=0.03)
    assert mtbf(0, 10 * month) > before


def row(step: int, step_s: float, *, memory: bool = False, remote: bool = False) -> StepRow:
    return replace(
        fake_cluster.row(1, step),
        step_time_s=step_s,
        checkpoint_wait_s=0.004 if memory else 0.0,
        memory_saved=memory,
        remote_saving=remote,
    )


def test_save_costs_are_the_extra_time_of_steps_with_a_save() -> None:
    costs = SaveCosts()
    assert costs.memory_s is costs.remote_s is costs.step_s is None
    for step in range(1, 101):
        memory, remote = step % 2 == 0, step % 20 in (0, 1, 2)
        step_s = 0.1 + 0.01 * memory + 0.2 * remote
        if step % 33 == 0:
            step_s += 5.0  # an outlier is not a cost of a save
        costs.add_rows([row(step, step_s, memory=memory, remote=remote)])
    assert costs.step_s == pytest.approx(0.105, abs=0.006)
    assert costs.memory_s == pytest.approx(0.01, abs=0.001)
    assert costs.remote_s == pytest.approx(0.6, abs=0.03)


def test_repeated_or_late_rows_change_nothing() -> None:
    costs, again = SaveCosts(), SaveCosts()
    rows = [row(step, 0.1, memory=step % 2 == 0) for step in range(1, 60)]
    costs.add_rows(rows)
    for step in range(1, 60):
        again.add_rows(rows[:step])
    assert (costs.memory_s, costs.step_s) == (again.memory_s, again.step_s)


def test_a_save_costs_at_least_the_time_that_training_waited() -> None:
    costs = SaveCosts()
    costs.add_rows([row(step, 0.1, memory=step % 2 == 0) for step in range(1, 60)])
    assert costs.memory_s == 0.004
