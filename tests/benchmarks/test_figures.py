"""Figures that the benchmarks compute from their measurements, and validity of their jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from benchmarks.conditions import EXAMPLE, load_job, machine
from benchmarks.figures import (
    AppliedStep,
    Recovery,
    SideFigures,
    StormFigure,
    median_phases,
    overhead_summary,
    recovery,
    recovery_summary,
    storm_limit,
    storm_rate,
)
from benchmarks.overhead import without_checkpoints
from benchmarks.recovery import SMALL_JOB, endless, ray_train_spec
from benchmarks.storm import job as storm_job

from holdfast_service.job_model.job_spec import parse

OLD_WORLD = [AppliedStep(1, 9, 1.0), AppliedStep(1, 10, 2.0)]


def fault(recovery_s: float, **phases_s: float) -> Recovery:
    return Recovery(10.0, 10, 9.5, 10.0 + recovery_s, phases_s)


def test_a_recovery_ends_with_the_first_step_beyond_the_old_world() -> None:
    again = [*OLD_WORLD, AppliedStep(2, 10, 5.0)]  # recomputed: no progress yet
    assert recovery(again, at=2.5) is None
    found = recovery([*again, AppliedStep(2, 11, 6.0), AppliedStep(2, 12, 7.0)], at=2.5)
    assert found is not None
    assert (found.last_step, found.recovery_s, found.pause_s) == (10, 3.5, 4.0)


def test_a_step_in_flight_at_the_kill_belongs_to_the_old_world() -> None:
    steps = [AppliedStep(1, 10, 2.0), AppliedStep(1, 11, 2.51), AppliedStep(2, 11, 5.0)]
    assert recovery(steps, at=2.5) is None
    found = recovery([*steps, AppliedStep(2, 12, 6.0)], at=2.5)
    assert found is not None and (found.last_step, found.recovery_s) == (11, 3.5)


def test_a_step_that_a_history_has_of_the_new_world_alone_ends_no_recovery() -> None:
    steps = [OLD_WORLD[0], AppliedStep(2, 10, 5.0)]
    assert recovery(steps, 2.5, 2, reached=10) is None
    found = recovery([*steps, AppliedStep(2, 11, 6.0)], 2.5, 2, reached=10)
    assert found is not None and (found.last_step, found.pause_s) == (10, 5.0)


def test_a_world_between_the_old_and_the_wanted_one_counts_as_old() -> None:
    steps = [*OLD_WORLD, AppliedStep(2, 11, 5.0), AppliedStep(3, 12, 6.0)]
    found = recovery(steps, 2.5, 3)
    assert found is not None and (found.last_step, found.pause_s) == (11, 1.0)


def test_there_is_no_recovery_without_a_new_world() -> None:
    assert recovery(OLD_WORLD, at=1.5) is None
    assert recovery([], at=2.0) is None


def test_ray_train_is_compared_at_its_better_setting() -> None:
    summary = recovery_summary(
        [fault(0.5, form=0.1), fault(0.4, form=0.3), fault(0.9)],
        {"default": [fault(12.0), fault(14.0)], "best": [fault(9.0), fault(11.0)]},
    )
    assert (summary.ray_train_setting, summary.ratio, summary.least_ratio) == ("best", 20.0, 10.0)
    assert summary.holdfast == SideFigures(0.5, [0.4, 0.9], {"form": 0.2}, 3)
    assert summary.ray_train["default"].median_s == 13.0
    assert recovery_summary([fault(0.5)], {}).ratio is None


def test_an_unmeasured_phase_does_not_count_as_zero() -> None:
    assert median_phases([{"form": 0.2}, {"form": 0.4, "x": 1.0}]) == {"form": 0.3, "x": 1.0}


def test_overhead_compares_each_run_with_its_neighbours() -> None:
    runs = [[1.0, 1.0, 1.1], [1.2, 1.3, 1.0]]
    summary = overhead_summary(runs, [[0.8, 0.8, 9.0], [1.2, 1.2, 1.2], [1.2, 1.2, 1.2]], {}, 0.0)
    assert summary.round_ratios == [1.0, 1.0]  # only the machine became slower
    assert summary.ratio == 1.0
    assert overhead_summary([[1.1]], [[1.0], [1.0]], {}, 0.0).ratio == 1.1
    with pytest.raises(ValueError, match="2 bare ones"):
        overhead_summary([[1.0]], [[1.0]], {}, 0.0)


def test_the_measured_jobs_are_valid(tmp_path: Path) -> None:
    job = load_job(EXAMPLE)
    for faulty in (parse(endless(job), None), parse(endless(load_job(SMALL_JOB)), None)):
        assert faulty.checkpoint.memory.every_steps == 1
    bare = parse(without_checkpoints(job, 42), None)
    assert bare.train.steps == 42
    assert bare.checkpoint.memory.every_steps == bare.checkpoint.remote.every_steps == 0
    assert ray_train_spec(job)["checkpoint"]["digest_every_steps"] == 0
    assert job == yaml.safe_load(EXAMPLE.read_text()), "the original was changed"


def test_a_file_without_a_job_raises(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("- 1\n")
    with pytest.raises(ValueError, match="not a job"):
        load_job(path)


def test_conditions_include_versions_and_load() -> None:
    assert {"torch", "ray", "cores", "load"} <= set(machine())


def test_the_storm_limit_is_that_of_a_synchronous_scheme() -> None:
    assert storm_limit(1.0, 5.5) == pytest.approx(0.91, abs=0.005)
    assert storm_limit(1.0, 1.0) == pytest.approx(0.58, abs=0.005)
    assert storm_limit(1.0, 1e9) == pytest.approx(1.0)


def test_an_efficiency_is_compared_with_the_limit_and_torchft() -> None:
    ours = StormFigure(1.0, 0.819, 40)
    found = storm_rate(ours, StormFigure(1.1, 0.39, 40), 5.5)
    assert found.of_limit == pytest.approx(0.898, abs=0.002)
    assert found.of_torchft == pytest.approx(2.1)
    assert storm_rate(ours, StormFigure(1.1, 0.0, 9), 5.5).of_torchft is None
    assert storm_rate(ours, None, 5.5).of_torchft is None


def test_the_storm_job_is_valid() -> None:
    spec = parse(storm_job(), None)
    assert spec.recovery.max_without_progress > 1000
