"""The comparison of a replay with the job that it replays."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_service.job_model.mesh_history import MeshSpan
from holdfast_service.job_model.replay import ReplayMark
from holdfast_service.readers.replay_comparison import ReplayedRun, ReplayProgress, compare
from holdfast_service.views.comparison import ComparisonView, ReplayResult, joined

UNTIL = 12
MESHES = (MeshSpan(0, {"dp_shard": 4}), MeshSpan(5, {"dp_shard": 2}))
LATE = (MESHES[0], MeshSpan(6, {"dp_shard": 2}))


def digests(last: int = UNTIL, *, without: int = 0, **changed: str) -> dict[int, str]:
    """`s3="x"`: step 3 has the digest x."""
    found = {step: f"d{step}" for step in range(1, last + 1) if step != without}
    return found | {int(name[1:]): digest for name, digest in changed.items()}


def compared(
    original: dict[int, str],
    replay: dict[int, str],
    *,
    meshes: tuple[MeshSpan, ...] = MESHES,
    has_ended: bool = False,
    after: int = 0,
    limit: int = UNTIL,
) -> ComparisonView:
    return compare(
        ReplayMark("original", UNTIL),
        ReplayProgress("replay", min(UNTIL, max(replay, default=0)), has_ended),
        ReplayedRun(MESHES, original),
        ReplayedRun(meshes, replay),
        range(after + 1, min(UNTIL, after + limit) + 1),
    )


def test_a_replay_with_the_same_digests_is_equal() -> None:
    found = compared(digests(), digests(20))
    assert found.result is ReplayResult.EQUAL
    assert (found.equal, found.compared, found.one_sided, found.to_come) == (12, 12, 0, 0)
    assert [(span.after_step, span.ranks) for span in found.meshes] == [(0, 4), (5, 2)]


def test_the_first_of_several_differences_is_shown_with_both_digests() -> None:
    found = compared(digests(s7="other", s9="other"), digests(10))
    assert found.result is ReplayResult.DIFFERENT
    assert found.first_difference is not None
    assert found.first_difference.model_dump() == {"step": 7, "original": "other", "replay": "d7"}
    assert (found.equal, found.compared) == (8, 10)


def test_a_replay_on_its_way_is_equal_so_far() -> None:
    found = compared(digests(), digests(4), meshes=MESHES[:1])
    assert found.result is ReplayResult.RUNNING
    assert (found.equal, found.reached_step, found.to_come) == (4, 4, 8)
    assert compared(digests(), {}).result is ReplayResult.RUNNING


def test_a_replay_that_ended_too_early_proves_nothing() -> None:
    found = compared(digests(), digests(4), meshes=MESHES[:1], has_ended=True)
    assert found.result is ReplayResult.INCOMPLETE
    assert compared({}, digests()).result is ReplayResult.INCOMPLETE


def test_a_replay_that_left_a_mesh_late_is_disturbed_and_not_different() -> None:
    found = compared(digests(), digests(s6="by another mesh", s7="and so on"), meshes=LATE)
    assert found.result is ReplayResult.DISTURBED
    assert (found.equal, found.compared, found.same_meshes_until) == (5, 5, 5)
    earlier = compared(digests(s3="other"), digests(), meshes=LATE)
    assert earlier.result is ReplayResult.DIFFERENT, "a difference on the same mesh is one"


def test_a_step_without_a_digest_in_one_run_is_counted() -> None:
    found = compared(digests(without=5), digests(without=8))
    assert found.result is ReplayResult.EQUAL
    assert (found.equal, found.compared, found.one_sided) == (10, 10, 2)


@pytest.mark.parametrize(
    "runs",
    [
        {"original": digests(), "replay": digests(20)},
        {"original": digests(s7="other"), "replay": digests()},
        {"original": digests(s2="other"), "replay": digests(9)},
        {"original": digests(), "replay": digests(s6="x"), "meshes": LATE},
        {"original": digests(without=3), "replay": digests(without=11)},
        {"original": digests(), "replay": digests(7), "has_ended": True},
        {"original": {}, "replay": digests()},
    ],
)
def test_pages_together_say_the_same_as_the_whole(runs: dict[str, Any]) -> None:
    found = compared(**runs, limit=5)
    while found.next_cursor is not None:
        found = joined(found, compared(**runs, after=found.last_step, limit=5))
    assert found == compared(**runs)
