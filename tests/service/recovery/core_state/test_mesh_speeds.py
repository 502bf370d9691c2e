"""The measured throughput of meshes, from step rows."""

from __future__ import annotations

from dataclasses import replace

from tests.support.service.fake_cluster import row

from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.recovery.core_state.mesh_speeds import ASSUMED_PAUSE_S, MeshSpeeds
from holdfast_workers.protocol.messages import StepRow

FOUR, TWO = (WorldShape.of({"dp_shard": ranks}, 1) for ranks in (4, 2))
SHAPES = {1: FOUR, 2: TWO, 3: FOUR}


def rows(attempt: int, first: int, count: int, step_time_s: float, at: float) -> list[StepRow]:
    return [
        replace(
            row(attempt, first + n), at=at + n * step_time_s, tokens=100, step_time_s=step_time_s
        )
        for n in range(count)
    ]


def test_the_first_steps_of_an_attempt_are_not_measured_and_the_median_counts() -> None:
    speeds = MeshSpeeds()
    speeds.add_rows(rows(1, 1, 3, 9.0, 0.0), SHAPES)
    speeds.add_rows(rows(1, 4, 4, 0.5, 30.0), SHAPES)
    assert (speeds.tokens_per_s, speeds.of_attempt(1)) == ({}, None), "too few steps"
    speeds.add_rows(rows(1, 8, 1, 50.0, 40.0), SHAPES)
    speeds.add_rows(rows(1, 4, 4, 0.1, 30.0), SHAPES)  # known steps
    assert speeds.tokens_per_s == {FOUR: 200.0}
    assert (speeds.of_attempt(1), speeds.of_attempt(2)) == (200.0, None)


def test_a_later_attempt_on_a_mesh_replaces_what_an_earlier_one_measured() -> None:
    speeds = MeshSpeeds()
    speeds.add_rows(rows(1, 1, 10, 0.5, 0.0), SHAPES)
    speeds.add_rows(rows(2, 11, 10, 1.0, 20.0), SHAPES)
    speeds.add_rows(rows(1, 11, 10, 0.1, 20.0), SHAPES)  # of an older attempt
    assert speeds.tokens_per_s == {FOUR: 200.0, TWO: 100.0}
    speeds.add_rows(rows(3, 21, 8, 0.25, 40.0), SHAPES)
    assert speeds.tokens_per_s[FOUR] == 400.0


def test_the_pause_is_the_shortest_gap_between_two_meshes() -> None:
    speeds = MeshSpeeds()
    assert speeds.pause_s == ASSUMED_PAUSE_S
    speeds.add_rows(rows(1, 1, 2, 1.0, 0.0), SHAPES)
    speeds.add_rows(rows(2, 3, 2, 1.0, 64.0), SHAPES)
    assert speeds.pause_s == 62.0
    speeds.add_rows(rows(3, 5, 2, 1.0, 70.0), SHAPES)
    assert speeds.pause_s == 4.0


def test_rows_of_an_unknown_attempt_change_nothing() -> None:
    speeds = MeshSpeeds()
    speeds.add_rows(rows(9, 1, 10, 1.0, 0.0), SHAPES)
    assert (speeds.tokens_per_s, speeds.tokens_per_step) == ({}, None)


def test_the_journal_restores_what_earlier_attempts_measured() -> None:
    speeds = MeshSpeeds()
    speeds.restore(Facts(speeds={1: 300.0, 2: 200.0, 9: 1.0}), SHAPES)
    assert speeds.tokens_per_s == {FOUR: 300.0, TWO: 200.0}
