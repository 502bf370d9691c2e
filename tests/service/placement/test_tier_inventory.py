"""The restorable steps of a mesh in each tier, and the missing parts of other steps."""

from __future__ import annotations

from functools import partial
from itertools import product
from math import prod
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.placement.restore_points import (
    BadCopy,
    HeldCopy,
    HistoryLine,
    RemoteCheckpoint,
    RestoreSource,
    find_restore_point,
)
from holdfast_service.placement.tier_inventory import (
    Holding,
    holdings,
    newest_restorable,
    why_not_newer,
)
from holdfast_workers.protocol.messages import Held, Place
from holdfast_workers.state.replicas import ReplicaEquality

MESHES = [
    dict(zip(("dp_replicate", "dp_shard", "tp"), sizes, strict=True))
    for sizes in product((1, 2), repeat=3)
]


def tag(mesh: dict[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def copy(
    agent: str, rank: int, step: int, attempt: int, mesh: dict[str, int], *, divisible: bool = True
) -> HeldCopy:
    held = Held(rank, step, attempt, tag(mesh), "d", 1, Place.OWN, divisible=divisible)
    return HeldCopy(agent, "i", agent, 1, held)


@st.composite
def inventories(draw: st.DrawFn) -> dict[str, Any]:
    """Copies of a few steps on a few meshes, some ranks missing, some bad."""
    copies = []
    for _ in range(draw(st.integers(0, 4))):
        mesh, step = draw(st.sampled_from(MESHES)), draw(st.integers(1, 3))
        attempt = draw(st.integers(1, 2))
        ranks = draw(st.sets(st.integers(0, prod(mesh.values()) - 1), min_size=1))
        agent, divisible = draw(st.sampled_from("ab")), draw(st.booleans())
        copies += [copy(agent, rank, step, attempt, mesh, divisible=divisible) for rank in ranks]
    bad = [
        BadCopy(held.agent, Place.OWN, held.held.rank, held.held.attempt, held.held.step)
        for held in copies
        if draw(st.integers(0, 9)) == 0
    ]
    started = draw(st.integers(0, 3))
    return {
        "copies": copies,
        "remotes": [RemoteCheckpoint(step, 1, f"u{step}") for step in draw(st.sets(st.just(2)))],
        "line": HistoryLine().with_attempt(1, 0).with_run(1).with_attempt(2, started).with_run(2),
        "bad": frozenset(bad),
        "equality": draw(st.sampled_from(ReplicaEquality)),
    }


@given(inventories(), st.sampled_from(MESHES))
def test_the_newest_complete_holding_is_the_restore_point(
    known: dict[str, Any], mesh: dict[str, int]
) -> None:
    point = find_restore_point(world_size=prod(mesh.values()), mesh=mesh, **known)
    complete = newest_restorable(holdings(mesh, **known))
    best = max(complete.values(), key=lambda holding: holding.step, default=None)
    if best is None:
        assert point.source is RestoreSource.INIT
    else:
        assert point.step == best.step
        assert point.step == complete[point.source].step
        assert point.attempt == complete[point.source].attempt


def test_an_incomplete_step_lists_its_missing_ranks() -> None:
    mesh = {"dp_replicate": 2, "dp_shard": 2, "tp": 1}
    copies = [copy("a", rank, 5, 1, mesh) for rank in (0, 3)]
    equal = partial(holdings, line=HistoryLine(), equality=ReplicaEquality.PAYLOAD)
    found = equal(mesh, copies, [])
    assert found == [
        Holding(RestoreSource.MEMORY, 5, 1, tag(mesh), ((1,), (2,))),
        Holding(RestoreSource.RESHARD, 5, 1, tag(mesh)),
    ]
    assert not any(holding.complete for holding in holdings(mesh, copies, [], HistoryLine()))
    other = {"dp_replicate": 1, "dp_shard": 1, "tp": 1}
    (lacking,) = equal(other, copies[:1], [])
    assert (lacking.complete, lacking.missing) == (False, ((1, 3),))


def test_a_step_that_only_its_own_mesh_can_load_says_so() -> None:
    mesh = {"dp_shard": 3}
    copies = [copy("a", rank, 20, 1, mesh, divisible=False) for rank in range(3)]
    (own,) = holdings(mesh, copies, [], HistoryLine())
    assert own.complete
    (of_three,) = found = holdings({"dp_shard": 2}, copies, [], HistoryLine())
    assert not of_three.complete
    assert why_not_newer(found, 0) == (
        "step 20 is in memory as each rank's own state, which only a world of dp_shard=3 can load"
    )


def test_each_tier_has_its_newest_complete_step() -> None:
    mesh = {"dp_replicate": 1, "dp_shard": 2, "tp": 1}
    whole = [copy("a", rank, 7, 1, mesh) for rank in (0, 1)]
    half = [copy("a", 0, 8, 1, mesh)]
    remotes = [RemoteCheckpoint(4, 1, "u"), RemoteCheckpoint(6, 1, "bad")]
    found = newest_restorable(
        holdings(mesh, whole + half, remotes, HistoryLine(), bad_uris=frozenset({"bad"}))
    )
    assert {source: holding.step for source, holding in found.items()} == {
        RestoreSource.MEMORY: 7,
        RestoreSource.REMOTE: 4,
    }


def test_the_later_of_two_attempts_at_a_step_comes_first() -> None:
    mesh = {"dp_replicate": 1, "dp_shard": 1, "tp": 1}
    remotes = [RemoteCheckpoint(4, attempt, f"u{attempt}") for attempt in (1, 2)]
    found = holdings(mesh, [], remotes, HistoryLine())
    assert [(holding.step, holding.attempt) for holding in found] == [(4, 2), (4, 1)]


def test_missing_ranks_of_newer_steps_are_described_as_text() -> None:
    mesh = {"dp_replicate": 1, "dp_shard": 3, "tp": 1}
    whole = [copy("a", rank, 7, 1, mesh) for rank in (0, 1, 2)]
    found = holdings(mesh, [*whole, copy("a", 1, 8, 1, mesh)], [], HistoryLine())
    assert why_not_newer(found, 7) == "step 8 is in memory without rank 0, 2"
    assert why_not_newer(found, 8) == ""
