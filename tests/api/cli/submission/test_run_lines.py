"""Lines about the ranks of a followed program: their processes, and whose error came first."""

from __future__ import annotations

import pytest

from holdfast.cli.submission.run_lines import SHOWN_RANKS, errors_of_others, places
from holdfast_service.policy.causes import Cause
from holdfast_service.policy.incident_parts import LostItem
from holdfast_service.views.attempts import AttemptView, MemberView, RestoreView
from holdfast_service.views.incidents import IncidentView

KILLED = LostItem(cause="worker_crash", rank=1)
PEER = LostItem(cause="communication", rank=0)


def attempt(ranks: int, hosts: int = 1) -> AttemptView:
    members = [
        MemberView(
            rank=rank,
            worker="",
            agent=f"n{rank // 2}",
            node_id="",
            host=f"10.0.0.{rank // 2 % hosts}",
            pid=100 + rank,
            role="worker",
        )
        for rank in reversed(range(ranks))
    ]
    return AttemptView(
        number=2,
        state="running",
        mesh={},
        world_size=ranks,
        members=tuple(members),
        standbys=(),
        restore=RestoreView(),
        cause_incident=None,
        joined={},
        first_step=None,
        last_step=None,
        forming_at=1.0,
        running_at=2.0,
        ended_at=None,
        reason=None,
    )


def incident(cause: Cause, *lost: LostItem, level: int = 0) -> IncidentView:
    return IncidentView(
        number=1,
        cause=cause,
        attempt=2,
        lost=lost,
        evidence=(),
        decision=None,
        reason=None,
        level=level,
        restored_step=None,
        steps_lost=None,
        tiers={},
        phases_s={},
        opened_at=1.0,
        closed_at=2.0,
        resolution=None,
    )


def test_the_processes_of_an_attempt_are_named() -> None:
    assert places(attempt(2)) == "attempt 2 runs: rank 0 pid 100, rank 1 pid 101 on n0"
    line = places(attempt(3, hosts=2))
    assert line.endswith("on n0 (10.0.0.0); rank 2 pid 102 on n1 (10.0.0.1)")


def test_of_many_ranks_only_the_first_are_named() -> None:
    line = places(attempt(SHOWN_RANKS + 48))
    assert line.endswith("; and 48 ranks more (`holdfast describe`)")
    assert line.count("pid") == SHOWN_RANKS


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("lost", [(KILLED,), (PEER, KILLED)])
def test_errors_of_the_ranks_that_lost_a_peer_are_said_to_follow(
    level: int, lost: tuple[LostItem, ...]
) -> None:
    note = errors_of_others(incident(Cause.WORKER_CRASH, *lost, level=level), [attempt(2)])
    assert note == (
        "If rank 0 printed an error about a lost connection, it follows: it lost its peer."
    )
    note = errors_of_others(incident(Cause.WORKER_CRASH, *lost, level=level), [attempt(4)])
    assert note is not None and "If ranks 0, 2 and 3 printed" in note


@pytest.mark.parametrize(
    "given",
    [
        incident(Cause.COMMUNICATION, PEER),  # nobody knows what came first
        incident(Cause.WORKER_CRASH, KILLED, LostItem(cause="user_error", rank=0)),
        incident(Cause.WORKER_CRASH, KILLED, level=3),  # its survivors print nothing
        incident(Cause.RESIZE),
        incident(Cause.NODE_LOST, LostItem(cause="node_lost", ranks=(0, 1))),
    ],
)
def test_nothing_is_said_of_errors_that_may_not_follow(given: IncidentView) -> None:
    assert errors_of_others(given, [attempt(2)]) is None
