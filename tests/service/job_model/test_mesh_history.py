"""The mesh history: which mesh computed each committed step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.job_model.mesh_history import (
    MeshSpan,
    mesh_history,
    same_until,
    since,
    until,
)


def test_attempts_on_one_mesh_are_one_span() -> None:
    attempts = [(0, {"dp_shard": 4}), (7, {"dp_shard": 4}), (20, {"dp_shard": 4, "tp": 1})]
    assert mesh_history(attempts) == (MeshSpan(0, {"dp_shard": 4}),)


def test_an_attempt_that_restored_an_older_step_replaces_what_came_after_it() -> None:
    attempts = [(0, {"dp_shard": 4}), (30, {"dp_shard": 2}), (10, {"dp_shard": 4})]
    assert mesh_history(attempts) == (MeshSpan(0, {"dp_shard": 4}),)


def test_an_attempt_that_committed_no_step_leaves_no_trace() -> None:
    attempts = [(0, {"dp_shard": 4}), (30, {"dp_shard": 3}), (30, {"dp_shard": 2})]
    assert mesh_history(attempts) == (MeshSpan(0, {"dp_shard": 4}), MeshSpan(30, {"dp_shard": 2}))


def test_a_span_that_begins_with_the_last_step_has_no_steps() -> None:
    history = mesh_history([(0, {"dp_shard": 4}), (30, {"dp_shard": 2})])
    assert until(history, 30) == history[:1]


def test_a_job_that_began_at_a_later_step_has_no_meshes_before_it() -> None:
    history = mesh_history([(100, {"dp_shard": 4}), (100, {"dp_shard": 3}), (120, {"dp_shard": 2})])
    assert since(history, 100) == (MeshSpan(0, {"dp_shard": 3}), MeshSpan(120, {"dp_shard": 2}))
    assert since(history[:1], 100) == history[:1]


def test_histories_are_the_same_up_to_the_first_step_on_another_mesh() -> None:
    meshes = [{"dp_shard": size} for size in (4, 2, 4)]
    history = mesh_history(zip((0, 40, 90), meshes, strict=True))
    late = mesh_history(zip((0, 41, 90), meshes, strict=True))
    assert same_until(history, history, 120) == 120
    assert same_until(history, late, 120) == same_until(late, history, 120) == 40
    assert same_until(history, late, 40) == 40
    assert same_until(history, history[:2], 120) == 90
    assert same_until(history, history[:2], 90) == 90
    other = (*history[:1], MeshSpan(40, {"dp_shard": 3}))
    assert same_until(history, other, 120) == 40


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(1, 3)), max_size=12))
def test_the_history_names_the_mesh_that_computed_each_step_last(
    attempts: list[tuple[int, int, int]],
) -> None:
    """Each attempt restores a step that was committed, and commits some more."""
    committed, computed, formed = 0, dict[int, int](), []
    for made, back, size in attempts:
        restored = max(0, committed - back)
        formed.append((restored, {"dp_shard": size}))
        committed = restored + made
        computed |= dict.fromkeys(range(restored + 1, committed + 1), size)
    spans = until(mesh_history(formed), committed)
    for step in range(1, committed + 1):
        span = [span for span in spans if span.after_step < step][-1]
        assert span.mesh.get("dp_shard", 1) == computed[step]
