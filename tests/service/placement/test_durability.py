"""Losses that placements survive: probabilities against GEMINI's formula, and gaps as text."""

from __future__ import annotations

from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.placement.durability import gaps, protection, recovery_odds
from holdfast_service.placement.replica_placement import Placement, Site, place_partners


def holders(placement: Placement) -> list[frozenset[str]]:
    topology = placement.topology
    return [frozenset(topology.agents(shard.home | shard.copies)) for shard in placement.shards]


def on_nodes(mesh: dict[str, int], nodes: int, *, copies: int = 1) -> Placement:
    world = 1
    for size in mesh.values():
        world *= size
    seats = {rank: f"n{rank * nodes // world}" for rank in range(world)}
    return place_partners(
        mesh, seats, [Site(f"n{i}", f"x{i}") for i in range(nodes)], copies=copies
    )


@pytest.mark.parametrize("nodes", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_two_lost_nodes_are_survived_as_often_as_geminis_formula_says(
    nodes: int, per_node: int
) -> None:
    """GEMINI (SOSP 2023), corollary 1 for m = k = 2: 1 - (N / 2) / C(N, 2)."""
    placed = on_nodes({"dp_shard": nodes * per_node}, nodes)
    odds = recovery_odds(holders(placed), 2)
    assert odds.probability == pytest.approx(1 - (nodes / 2) / comb(nodes, 2))
    assert odds.standard_error == 0


@pytest.mark.parametrize("nodes", [4, 6, 8])
def test_three_lost_nodes_are_survived_at_least_as_often_as_geminis_bound_says(nodes: int) -> None:
    """Corollary 1 for k > m: at least 1 - (N / m) * C(N - m, k - m) / C(N, k)."""
    odds = recovery_odds(holders(on_nodes({"dp_shard": nodes}, nodes)), 3)
    assert odds.probability >= 1 - (nodes / 2) * comb(nodes - 2, 1) / comb(nodes, 3) - 1e-12


@given(
    st.lists(st.frozensets(st.sampled_from("abcdefg"), min_size=1, max_size=3), min_size=1),
    st.integers(0, 7),
)
def test_the_probability_is_the_share_of_sets_whose_loss_keeps_every_state(
    held: list[frozenset[str]], lost: int
) -> None:
    machines = sorted({name for holders_ in held for name in holders_})
    if lost > len(machines):
        with pytest.raises(ValueError, match="cannot be lost"):
            recovery_odds(held, lost)
        return
    sets = [set(names) for names in combinations(machines, lost)]
    survived = sum(all(holders_ - gone for holders_ in held) for gone in sets)
    assert recovery_odds(held, lost).probability == pytest.approx(survived / len(sets))


def test_too_many_sets_are_sampled_and_the_standard_error_is_reported() -> None:
    placed = on_nodes({"dp_shard": 128}, 128)
    odds = recovery_odds(holders(placed), 4)
    assert odds == recovery_odds(holders(placed), 4)
    pairs = 64
    exact = 2**4 * comb(pairs, 4) / comb(128, 4)
    assert 0 < odds.standard_error < 0.01
    assert abs(odds.probability - exact) < 4 * odds.standard_error


def test_a_protected_placement_has_no_gaps() -> None:
    assert gaps(on_nodes({"dp_shard": 2, "tp": 2}, 4)) == []


def test_eviction_of_a_group_on_every_machine_is_reported_as_a_gap() -> None:
    placed = on_nodes({"dp_shard": 4, "tp": 2}, 4)
    (gap,) = gaps(placed)
    assert gap.text == (
        "evicting all machines of the dp_shard group of ranks 0, 2, 4, 6 (and of 1 more on the "
        "same machines) would lose the memory checkpoints of ranks 0, 1, 2, 3, 4, 5, 6, 7: "
        "no legal placement: the group is on every machine that trains"
    )
    assert protection(placed).unprotected == (), "nobody can do anything about it"


def test_a_job_of_one_node_is_told_to_take_another_one() -> None:
    (text,) = protection(on_nodes({"dp_shard": 2}, 1)).unprotected
    assert text.endswith(
        "ranks 0, 1: the job has one node, and a copy needs another one: give it more nodes"
    )


def test_failed_links_are_named_as_the_reason() -> None:
    seats = {rank: f"n{rank}" for rank in range(4)}
    sites = [Site(f"n{rank}", f"x{rank}") for rank in range(4)]
    mesh = {"dp_shard": 2, "tp": 2}
    (around,) = gaps(place_partners(mesh, seats, sites, avoid=frozenset({("n0", "n3")})))
    assert around.ranks == (0,)
    assert "replication to n3 failed before" in around.why
    avoid = frozenset(("n0", f"n{other}") for other in range(1, 4))
    unreachable = gaps(place_partners(mesh, seats, sites, avoid=avoid))[0]
    assert (unreachable.what, unreachable.ranks) == ("losing 1 node at once", (0,))
    assert "failed before" in unreachable.why


def test_a_single_failure_domain_for_all_machines_is_a_gap() -> None:
    seats = {0: "n0", 1: "n1"}
    sites = [Site("n0", "x0", "rack"), Site("n1", "x1", "rack"), Site("n2", "x2", "rack")]
    texts = [gap.text for gap in gaps(place_partners({"tp": 2}, seats, sites))]
    assert any(
        "failure domain rack would lose the memory checkpoints of ranks 0, 1" in text
        for text in texts
    )


def test_one_node_does_not_keep_the_copies_of_a_whole_other_domain() -> None:
    seats = {rank: f"n{rank}" for rank in range(6)}
    sites = [Site(f"n{rank}", f"x{rank}", "a" if rank == 0 else "b") for rank in range(6)]
    found = gaps(place_partners({"dp_shard": 6}, seats, sites))
    (gap,) = [gap for gap in found if "domain" in gap.what]
    assert "too few to keep so many copies" in gap.why
    two = [Site(f"n{rank}", f"x{rank}", "a" if rank < 2 else "b") for rank in range(6)]
    assert not [
        gap for gap in gaps(place_partners({"dp_shard": 6}, seats, two)) if "dom" in gap.what
    ]


def test_zero_copies_protect_against_no_lost_node() -> None:
    texts = [gap.text for gap in gaps(on_nodes({"dp_shard": 2, "tp": 2}, 4, copies=0))]
    assert texts[0] == (
        "losing a node would lose the memory checkpoints of ranks 0, 1, 2, 3: "
        "checkpoint.memory.copies is 0"
    )
