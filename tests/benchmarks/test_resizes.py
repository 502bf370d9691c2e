"""Figures of `benchmarks.elastic`, its job, and the checkpoints of its Ray Train side."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from benchmarks.conditions import load_job
from benchmarks.elastic import ELASTIC_JOB
from benchmarks.figures import Recovery
from benchmarks.recovery import endless
from benchmarks.resizes.changes import Change, Sizes, elastic_summary
from tests.support.ranks import rank_file_programs as programs
from tests.support.ranks.rank_worlds import Worlds, tiny_spec

from holdfast_service.job_model.job_spec import parse
from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.recovery.core_state.mesh_change import Growth


def test_many_rounds_do_not_delay_the_growth_of_the_elastic_job() -> None:
    spec = parse(endless(load_job(ELASTIC_JOB)), None)
    limits, shape = spec.recovery, WorldShape((("dp_shard", 8),), 2)
    growth = Growth(limits.grow_after_s, limits.window_s)
    for at in range(0, 120, 5):
        growth.record_resize(shape, at)
    growth.offer(shape, 130.0)
    assert growth.due_at is not None
    assert growth.due_at - 130.0 <= 2 * limits.grow_after_s


def found_in(*recoveries: tuple[float, float]) -> list[Recovery]:
    """With these seconds, and these of the pause."""
    return [Recovery(10.0, 5, 10.0 + took - pause, 10.0 + took) for took, pause in recoveries]


def test_the_summary_has_medians_and_compares_with_the_better_setting() -> None:
    ours = {
        Change.IN_PLACE: found_in((0.4, 0.5), (0.3, 0.5), (9.0, 0.5)),
        Change.SHRINK: found_in((1.0, 1.1), (3.0, 3.1), (2.0, 2.1)),
        Change.GROW: found_in((20.0, 0.8)),
        Change.PLANNED_SHRINK: found_in((0.7, 0.6)),
        Change.PLANNED_GROW: found_in((15.0, 0.7)),
    }
    theirs = {
        "default": {Change.SHRINK: found_in((60.0, 61.0)), Change.GROW: found_in((40.0, 12.0))},
        "best": {Change.SHRINK: found_in((30.0, 31.0)), Change.GROW: found_in((30.0, 10.0))},
    }
    sizes = Sizes(4, 2, 3, 10)
    found = elastic_summary(ours, theirs, sizes, [0.5, 2.0])
    assert (found.shrink_s, found.planned_ratio) == (2.0, 1.4)
    assert (found.ray_train_setting, found.ratio) == ("best", 15.0)
    assert found.ray_train["default"]["grow"].pause_s == [12.0]
    assert found.ranks == [8, 6]
    alone = elastic_summary(ours, {}, sizes, [0.5, 2.0])
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
