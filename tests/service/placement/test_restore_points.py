"""The restore point: the newest step that all ranks can load, on the line of history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.placement.restore_points import (
    BadCopy,
    HeldCopy,
    HistoryLine,
    RemoteCheckpoint,
    RestorePoint,
    RestoreSource,
    copies_by_step,
    find_restore_point,
    restore_for,
)
from holdfast_workers.protocol.messages import Held, Place, Tier
from holdfast_workers.state.replicas import ReplicaEquality

MESH = {"dp_shard": 2, "tp": 1}


def held(
    agent: str,
    rank: int,
    step: int,
    attempt: int = 1,
    place: Place = Place.OWN,
    mesh: str = "dp_shard=2,tp=1",
    number: int = 0,
    divisible: bool = True,
) -> HeldCopy:
    shard = Held(rank, step, attempt, mesh, "d", 1, place, number, divisible)
    return HeldCopy(agent, "i1", agent, 1, shard)


def find(
    *copies: HeldCopy,
    remotes: Sequence[RemoteCheckpoint] = (),
    line: HistoryLine | None = None,
    **options: Any,
) -> RestorePoint:
    line = line or HistoryLine()
    return find_restore_point(
        world_size=2, mesh=MESH, copies=copies, remotes=remotes, line=line, **options
    )


def test_the_restore_point_is_the_newest_step_of_every_rank() -> None:
    point = find(held("a", 0, 7), held("a", 0, 8), held("b", 1, 7))
    assert (point.source, point.step) == (RestoreSource.MEMORY, 7)


def test_parts_of_different_saves_of_a_step_are_never_mixed() -> None:
    whole = held("a", 0, 6), held("b", 1, 6)
    torn = held("a", 0, 8, number=1), held("b", 1, 8, number=2)
    assert find(*torn, *whole).step == 6
    again = held("b", 1, 8, number=1)
    point = find(*torn, again)
    assert (point.step, point.copies) == (8, {0: torn[:1], 1: (again,)})
    assert restore_for(0, "a", point).number == 1


def test_steps_of_different_attempts_are_never_mixed() -> None:
    point = find(held("a", 0, 8, attempt=1), held("b", 1, 8, attempt=2))
    assert point.source is RestoreSource.INIT


def test_steps_replaced_by_a_later_attempt_are_never_restored() -> None:
    line = HistoryLine().with_attempt(1, 0).with_run(1).with_attempt(2, 5).with_run(2)
    copies = (held("a", 0, 7), held("b", 1, 7), held("a", 0, 5), held("b", 1, 5))
    assert find(*copies, line=line).step == 5
    assert (
        find(*copies, line=HistoryLine().with_attempt(1, 0).with_run(1).with_attempt(2, 5)).step
        == 7
    )


def test_rolled_back_steps_are_never_restored_after_later_attempts() -> None:
    line = HistoryLine().with_attempt(1, 0).with_run(1).with_rollback(1, 6).with_attempt(2, 6)
    copies = [held(a, r, step) for a, r in (("a", 0), ("b", 1)) for step in (6, 8)]
    later = (held("a", 0, 7, attempt=2), held("b", 1, 7, attempt=2))
    remotes = (RemoteCheckpoint(8, 1, "rolled back"), RemoteCheckpoint(5, 1, "older"))
    assert find(*copies, remotes=remotes, line=line).step == 6
    assert find(*copies, *later, remotes=remotes, line=line.with_run(2)).step == 7
    assert find(remotes=remotes, line=line).uri == "older"


def test_a_remote_checkpoint_is_preferred_only_if_it_is_newer() -> None:
    copies = (held("a", 0, 7), held("b", 1, 7))
    newer = find(*copies, remotes=(RemoteCheckpoint(8, 1, "u"),))
    assert (newer.source, newer.uri) == (RestoreSource.REMOTE, "u")
    assert find(*copies, remotes=(RemoteCheckpoint(7, 1, "u"),)).source is RestoreSource.MEMORY


def test_bad_copies_and_bad_checkpoints_are_skipped() -> None:
    replica = held("b", 0, 8, place=Place.REPLICA)
    copies = (held("a", 0, 8), replica, held("b", 1, 8))
    bad = frozenset({BadCopy("a", Place.OWN, 0, 1, 8)})
    assert find(*copies, bad=bad).copies[0] == (replica,)
    worse = bad | {BadCopy("b", Place.REPLICA, 0, 1, 8, "i1")}
    remotes = (RemoteCheckpoint(6, 1, "u"), RemoteCheckpoint(4, 1, "v"))
    assert find(*copies, bad=worse, remotes=remotes, bad_uris=frozenset({"u"})).uri == "v"


def test_a_copy_is_usable_again_after_its_agent_restarts() -> None:
    copies = (held("a", 0, 8), held("b", 1, 8))
    former = frozenset({BadCopy("a", Place.OWN, 0, 1, 8, "an earlier incarnation")})
    assert find(*copies, bad=former).step == 8


def test_ranks_of_two_meshes_do_not_form_a_state() -> None:
    assert (
        find(held("a", 0, 8), held("b", 1, 8, mesh="dp_shard=1,tp=2")).source is RestoreSource.INIT
    )


def test_a_complete_state_of_another_mesh_is_resharded() -> None:
    mesh = "dp_shard=1,tp=4"
    others = tuple(held("a" if rank < 2 else "b", rank, 9, 2, mesh=mesh) for rank in range(4))
    point = find(*others, held("a", 0, 8), held("b", 1, 8))
    assert (point.source, point.step, point.attempt, point.mesh) == (
        RestoreSource.RESHARD,
        9,
        2,
        mesh,
    )
    restore = restore_for(1, "c", point)
    assert (restore.tier, restore.mesh, restore.step) == (Tier.RESHARD, mesh, 9)
    assert [(origin.rank, origin.agent) for origin in restore.origins] == [
        (0, "a"), (1, "a"), (2, "b"), (3, "b"),
    ]  # fmt: skip


def test_copies_of_the_same_mesh_are_preferred_at_the_same_step() -> None:
    others = tuple(held("c", rank, 8, mesh="dp_shard=1,tp=2") for rank in range(2))
    assert find(*others, held("a", 0, 8), held("b", 1, 8)).source is RestoreSource.MEMORY
    again = tuple(held("c", rank, 8, 2, mesh="dp_shard=1,tp=2") for rank in range(2))
    point = find(*again, held("a", 0, 8), held("b", 1, 8))
    assert (point.source, point.attempt) == (RestoreSource.RESHARD, 2)


def test_an_incomplete_state_of_another_mesh_is_not_used() -> None:
    others = tuple(held("a", rank, 9, mesh="dp_shard=4,tp=1") for rank in (0, 1, 3))
    assert find(*others).source is RestoreSource.INIT
    (held_step,) = copies_by_step(others, frozenset())
    for equality in ReplicaEquality:
        assert held_step.missing_shards(equality) == [(2,)]


def test_the_own_state_of_ranks_is_for_their_mesh_alone() -> None:
    of_three = [held("a", rank, 20, mesh="dp_shard=3,tp=1", divisible=False) for rank in range(3)]
    assert find(*of_three).source is RestoreSource.INIT
    divided = [held("a", rank, 10, mesh="dp_shard=3,tp=1") for rank in range(3)]
    point = find(*of_three, *divided)
    assert (point.source, point.step) == (RestoreSource.RESHARD, 10)
    own = [held("a", rank, 5, 2, divisible=False) for rank in range(2)]
    point = find(*of_three, *own)
    assert (point.source, point.step) == (RestoreSource.MEMORY, 5)


def test_one_of_equal_replicas_of_every_shard_is_enough_for_another_mesh() -> None:
    mesh, equality = "dp_replicate=2,dp_shard=2,tp=1", ReplicaEquality.PAYLOAD
    enough = (held("a", 2, 9, mesh=mesh), held("b", 1, 9, mesh=mesh))
    short = (held("a", 2, 9, mesh=mesh), held("b", 0, 9, mesh=mesh))
    assert find(*enough, equality=equality).source is RestoreSource.RESHARD
    assert find(*short, equality=equality).source is RestoreSource.INIT


@pytest.mark.parametrize("equality", [ReplicaEquality.NOTHING, ReplicaEquality.SHARED])
def test_no_replica_stands_for_a_rank_whose_payload_may_be_its_own(
    equality: ReplicaEquality,
) -> None:
    mesh = "dp_replicate=2,dp_shard=2,tp=1"
    copies = tuple(held("a", rank, 9, mesh=mesh) for rank in range(4))
    assert find(*copies, equality=equality).source is RestoreSource.RESHARD
    for lost in range(4):
        left = (copy for copy in copies if copy.held.rank != lost)
        assert find(*left, equality=equality).source is RestoreSource.INIT


def test_bad_copies_of_another_mesh_are_not_used() -> None:
    mesh = "dp_shard=1,tp=2"
    copies = (held("a", 0, 9, mesh=mesh), held("a", 1, 9, mesh=mesh))
    bad = frozenset({BadCopy("a", Place.OWN, 1, 1, 9)})
    assert find(*copies).source is RestoreSource.RESHARD
    assert find(*copies, bad=bad).source is RestoreSource.INIT


def test_own_memory_is_preferred_to_the_partners_memory() -> None:
    point = find(held("a", 0, 8), held("b", 0, 8, place=Place.REPLICA), held("b", 1, 8))
    assert restore_for(0, "a", point).tier is Tier.OWN_RAM
    assert restore_for(0, "c", point).tier is Tier.PARTNER_RAM
    on_partner = restore_for(0, "b", point)
    assert (on_partner.tier, on_partner.place) == (Tier.OWN_RAM, Place.REPLICA)


def test_rolled_back_steps_are_not_restored_from_any_copy() -> None:
    line = (
        HistoryLine()
        .with_attempt(1, 0)
        .with_run(1)
        .with_attempt(2, 6)
        .with_run(2)
        .with_rollback(2, 8)
    )
    assert line.contains(2, 8)
    assert not line.contains(2, 9)
    assert line.with_attempt(3, 8).with_run(3).contains(3, 9)  # computed again
    copies = [held(f"a{rank}", rank, step, 2) for rank in range(2) for step in (8, 9)]
    remotes = [RemoteCheckpoint(9, 2, "r9"), RemoteCheckpoint(6, 1, "r6")]
    point = find_restore_point(world_size=2, mesh=MESH, copies=copies, remotes=remotes, line=line)
    assert (point.source, point.step) == (RestoreSource.MEMORY, 8)
    point = find_restore_point(
        world_size=2, mesh=MESH, copies=copies[1::2], remotes=remotes, line=line
    )
    assert (point.source, point.uri) == (RestoreSource.REMOTE, "r6")


@given(
    attempts=st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=6),
    cuts=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 30)), max_size=3),
)
def test_the_limits_of_attempts_are_those_of_the_line(
    attempts: list[tuple[int, bool]], cuts: list[tuple[int, int]]
) -> None:
    line = HistoryLine()
    for number, (step, ran) in enumerate(attempts, 1):
        line = line.with_attempt(number, step)
        line = line.with_run(number) if ran else line
    for attempt, step in cuts:
        line = line.with_rollback(attempt, step)
    limits = line.limits()
    for attempt in range(1, len(attempts) + 1):
        for step in range(32):
            assert line.contains(attempt, step) == (step <= limits.get(attempt, step))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.integers(1, 3), st.sampled_from(("dp_replicate=2", "dp_shard=3"))
        ),
        max_size=20,
    )
)
def test_of_a_program_a_step_is_restored_only_if_every_ranks_part_is_there(
    found: list[tuple[int, int, str]],
) -> None:
    copies = [held("a", rank, step, mesh=mesh) for rank, step, mesh in found]
    whole = [
        step
        for _, step, mesh in found
        if {(rank, step, mesh) for rank in range(int(mesh[-1]))} <= set(found)
    ]
    assert find(*copies, equality=ReplicaEquality.NOTHING).step == max(whole, default=0)
