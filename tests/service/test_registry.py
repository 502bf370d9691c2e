"""The restore point: newest step that all ranks can have, on the line of history, never mixed."""

from __future__ import annotations

from holdfast_service.registry import (
    BadCopy,
    Copy,
    Line,
    RemoteCheckpoint,
    RestorePoint,
    Source,
    find_restore_point,
    restore_for,
)
from holdfast_workers.messages import Held, Place, Tier

MESH = {"dp_shard": 2, "tp": 1}


def held(
    agent: str,
    rank: int,
    step: int,
    attempt: int = 1,
    place: Place = Place.OWN,
    mesh: str = "dp_shard=2,tp=1",
) -> Copy:
    return Copy(agent, "i1", agent, 1, Held(rank, step, attempt, mesh, "d", 1, place))


def find(*copies: Copy, remotes=(), line: Line | None = None, **bad) -> RestorePoint:
    return find_restore_point(
        world_size=2, mesh=MESH, copies=copies, remotes=remotes, line=line or Line(), **bad
    )


def test_the_newest_step_that_every_rank_has() -> None:
    point = find(held("a", 0, 7), held("a", 0, 8), held("b", 1, 7))
    assert (point.source, point.step) == (Source.MEMORY, 7)


def test_steps_of_different_attempts_are_never_mixed() -> None:
    point = find(held("a", 0, 8, attempt=1), held("b", 1, 8, attempt=2))
    assert point.source is Source.INIT


def test_what_a_later_attempt_has_replaced_never_comes_back() -> None:
    line = Line().formed(1, 0).ran(1).formed(2, 5).ran(2)
    copies = (held("a", 0, 7), held("b", 1, 7), held("a", 0, 5), held("b", 1, 5))
    assert find(*copies, line=line).step == 5
    assert find(*copies, line=Line().formed(1, 0).ran(1).formed(2, 5)).step == 7


def test_a_newer_remote_checkpoint_wins_and_an_equal_one_does_not() -> None:
    copies = (held("a", 0, 7), held("b", 1, 7))
    newer = find(*copies, remotes=(RemoteCheckpoint(8, 1, "u"),))
    assert (newer.source, newer.uri) == (Source.REMOTE, "u")
    assert find(*copies, remotes=(RemoteCheckpoint(7, 1, "u"),)).source is Source.MEMORY


def test_bad_copies_and_bad_checkpoints_are_passed_over() -> None:
    replica = held("b", 0, 8, place=Place.REPLICA)
    copies = (held("a", 0, 8), replica, held("b", 1, 8))
    bad = frozenset({BadCopy("a", Place.OWN, 0, 1, 8)})
    assert find(*copies, bad=bad).copies[0] == (replica,)
    worse = bad | {BadCopy("b", Place.REPLICA, 0, 1, 8, "i1")}
    remotes = (RemoteCheckpoint(6, 1, "u"), RemoteCheckpoint(4, 1, "v"))
    assert find(*copies, bad=worse, remotes=remotes, bad_uris=frozenset({"u"})).uri == "v"


def test_a_restarted_agent_has_verified_its_segments_again() -> None:
    copies = (held("a", 0, 8), held("b", 1, 8))
    former = frozenset({BadCopy("a", Place.OWN, 0, 1, 8, "an earlier life")})
    assert find(*copies, bad=former).step == 8


def test_a_payload_of_another_mesh_does_not_fit() -> None:
    assert find(held("a", 0, 8), held("b", 1, 8, mesh="dp_shard=1,tp=2")).source is Source.INIT


def test_own_memory_comes_before_the_partners() -> None:
    point = find(held("a", 0, 8), held("b", 0, 8, place=Place.REPLICA), held("b", 1, 8))
    assert restore_for(0, "a", point).tier is Tier.OWN_RAM
    assert restore_for(0, "c", point).tier is Tier.PARTNER_RAM
    on_partner = restore_for(0, "b", point)
    assert (on_partner.tier, on_partner.place) == (Tier.OWN_RAM, Place.REPLICA)
