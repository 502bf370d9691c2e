"""Figures of `benchmarks.elastic`, its job, and the checkpoints of its Ray Train side."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from benchmarks.conditions import load_job
from benchmarks.elastic import ELASTIC_JOB
from benchmarks.figures import AppliedStep
from benchmarks.recovery import endless
from benchmarks.resizes.changes import Change, MeasuredChange, elastic_summary, measure_change
from tests.support.ranks import rank_file_programs as programs
from tests.support.ranks.rank_worlds import Worlds, tiny_spec

from holdfast_service.job_model.job_spec import parse

OLD_WORLD = [AppliedStep(1, 9, 1.0), AppliedStep(1, 10, 2.0)]


def change(kind: Change, recovery_s: float, pause_s: float) -> MeasuredChange:
    return MeasuredChange(kind, (8, 6), 10.0, 5, 10.0 + recovery_s - pause_s, 10.0 + recovery_s, {})


def test_a_pause_runs_from_the_last_old_step_to_the_first_new_one() -> None:
    commits = [*OLD_WORLD, AppliedStep(2, 10, 5.0), AppliedStep(2, 11, 6.0), AppliedStep(2, 12, 7)]
    found = measure_change(Change.SHRINK, (8, 6), 2.5, 2, commits, {})
    assert found is not None
    assert (found.last_step, found.pause_s, found.recovery_s) == (10, 4.0, 3.5)


def test_a_step_that_is_only_computed_again_ends_no_pause() -> None:
    """In a history the computed-again step stands for the new world alone."""
    commits = [OLD_WORLD[0], AppliedStep(2, 10, 5.0)]
    assert measure_change(Change.GROW, (6, 8), 2.5, 2, commits, {}, reached=10) is None
    commits.append(AppliedStep(2, 11, 6.0))
    found = measure_change(Change.GROW, (6, 8), 2.5, 2, commits, {}, reached=10)
    assert found is not None
    assert (found.last_step, found.pause_s) == (10, 5.0)


def test_a_world_without_a_new_step_ends_no_pause() -> None:
    assert measure_change(Change.SHRINK, (8, 6), 2.5, 2, OLD_WORLD, {}) is None


def test_the_summary_has_medians_and_compares_with_the_better_setting() -> None:
    ours = [
        *(change(Change.IN_PLACE, seconds, 0.5) for seconds in (0.4, 0.3, 9.0)),
        *(change(Change.SHRINK, seconds, seconds + 0.1) for seconds in (1.0, 3.0, 2.0)),
        change(Change.GROW, 20.0, 0.8),
        change(Change.PLANNED_SHRINK, 0.7, 0.6),
        change(Change.PLANNED_GROW, 15.0, 0.7),
    ]
    theirs = {
        "default": [change(Change.SHRINK, 60.0, 61.0), change(Change.GROW, 40.0, 12.0)],
        "best": [change(Change.SHRINK, 30.0, 31.0), change(Change.GROW, 30.0, 10.0)],
    }
    found = elastic_summary(ours, theirs, [0.5, 2.0])
    assert (found.shrink_s, found.planned_ratio) == (2.0, 1.4)
    assert (found.ray_train_setting, found.ratio) == ("best", 15.0)
    assert found.ray_train["default"]["grow"].pause_s == [12.0]
    alone = elastic_summary(ours, {}, [0.5, 2.0])
    assert (alone.ray_train_setting, alone.ratio) == (None, None)


def test_the_job_has_a_mesh_on_every_number_of_nodes() -> None:
    spec = parse(endless(load_job(ELASTIC_JOB)), None)
    assert [shape.world_size for shape in spec.shapes] == [8, 6, 4]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_files_of_ranks_are_read_with_the_same_bits_by_ranks_of_another_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "words.txt").write_text(" ".join(str(random.Random(5).random()) for _ in range(4000)))
    monkeypatch.setenv("HOLDFAST_TEST_CORPUS", str(corpus))
    worlds, four, three = Worlds(tmp_path), tiny_spec({"dp_shard": 4}), tiny_spec({"dp_shard": 3})
    folders = [tmp_path / name for name in ("four", "three", "again")]
    for folder in folders:
        folder.mkdir()
    written = worlds.run(programs.trained, four, folders[0])
    on_three = worlds.run(programs.passed_on, three, folders[0], folders[1])
    assert [step for step, _ in on_three] == [four.train.steps] * 3
    on_four = worlds.run(programs.passed_on, four, folders[1], folders[2])
    assert [digest for _, digest in on_four] == written
    assert len(list(folders[1].iterdir())) == 2 * 3
