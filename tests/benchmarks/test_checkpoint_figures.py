"""Figures of the checkpoint benchmark, and validity of its jobs."""

from __future__ import annotations

import pytest
from benchmarks.checkpoint_parts.reshard import ReshardPair
from benchmarks.checkpoint_parts.reshard import summary as reshard_summary
from benchmarks.checkpoint_parts.saves import MeasuredSteps, job, saved, summary

from holdfast_service.job_model.job_spec import parse

FLOOR_S = {"copy": 0.02, "digest": 0.01, "send": 0.03}


def test_the_cost_of_a_save_includes_all_steps_of_its_interval() -> None:
    without = MeasuredSteps([1.0] * 10, [0.0] * 10)
    every_step = MeasuredSteps([1.1] * 10, [0.01] * 10)
    every_other = MeasuredSteps([1.05, 1.15] * 5, [0.0, 0.02] * 5, interval=2.0)
    assert every_step.added_s(without) == pytest.approx(0.1)
    assert every_other.added_s(without) == pytest.approx(0.2)
    assert (every_step.stall_s, every_other.stall_s) == pytest.approx((0.01, 0.02))
    assert MeasuredSteps([0.9], [0.0]).added_s(without) == 0.0


def test_the_slowest_tenth_of_the_steps_is_left_out() -> None:
    assert MeasuredSteps([1.0] * 9 + [60.0], [0.0] * 10).step_s == 1.0


def test_ratios_use_the_figures_with_a_partner_copy() -> None:
    found = {
        "none": MeasuredSteps([1.0], [0.0]),
        "torch_save": MeasuredSteps([1.5], [0.5]),
        "dcp_default": MeasuredSteps([2.0], [0.5]),
        "dcp_best": MeasuredSteps([1.8], [0.1]),
        "holdfast_none": MeasuredSteps([1.1], [0.0]),
        "holdfast_own": MeasuredSteps([1.13], [0.0]),
        "holdfast_partner": MeasuredSteps([1.16], [0.01]),
    }
    figures = summary(found, FLOOR_S)
    assert figures.stall_vs_dcp_default == pytest.approx(0.02)
    assert figures.stall_vs_dcp_best == pytest.approx(0.1)
    assert figures.own_added_vs_floor == pytest.approx(1.0)
    assert figures.added_vs_floor == pytest.approx(1.0)


def test_a_saver_that_was_left_out_has_no_ratio() -> None:
    names = ("none", "dcp_best", "holdfast_none", "holdfast_own", "holdfast_partner")
    found = {name: MeasuredSteps([1.0], [0.1]) for name in names}
    figures = summary(found, FLOOR_S)
    assert (figures.stall_vs_dcp_default, figures.stall_vs_dcp_best) == (None, 1.0)


def test_a_reshard_is_compared_with_the_sum_of_save_and_load() -> None:
    pairs = [ReshardPair("dp_shard 2", "tp 2", took, 1.0, took) for took in (1.0, 0.25, 3.0)]
    found = reshard_summary(pairs)
    assert (found.ratio, found.worst_ratio) == (0.5, 0.75)


@pytest.mark.parametrize("memory", [0, 1])
def test_the_measured_jobs_are_valid(memory: int) -> None:
    spec = parse(saved(job(2, 256, 20, 300), memory, 1), None)
    assert spec.checkpoint.memory.every_steps == memory
    assert spec.model.layers * spec.model.dim**2 * 4 == 256 << 20
