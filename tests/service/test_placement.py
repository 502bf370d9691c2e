"""Partner placement: another node always, another domain and other coordinates where there are."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.placement import Site, coordinates, place_partners


def sites(*names: str, capacity: int = 2) -> list[Site]:
    return [Site(name, f"node-{name}", "", capacity) for name in names]


def test_coordinates_count_the_innermost_axis_first() -> None:
    mesh = {"dp_shard": 2, "tp": 3}
    assert [coordinates(rank, mesh) for rank in range(4)] == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_two_agents_keep_each_others_state_and_spare_the_standby() -> None:
    seats = {0: "n0", 1: "n0", 2: "n1", 3: "n1"}
    placed = place_partners({"dp_shard": 2, "tp": 2}, seats, sites("n0", "n1", "n2"))
    assert placed == {0: "n1", 1: "n1", 2: "n0", 3: "n0"}


def test_a_standby_is_partner_only_of_an_agent_that_is_alone() -> None:
    seats = {0: "n0", 1: "n0"}
    assert place_partners({"tp": 2}, seats, sites("n0", "n1")) == {0: "n1", 1: "n1"}
    assert place_partners({"tp": 2}, seats, sites("n0")) == {0: None, 1: None}


def test_partners_differ_in_as_many_coordinates_as_the_mesh_allows() -> None:
    seats = {rank: f"n{rank}" for rank in range(4)}
    placed = place_partners({"dp_shard": 2, "tp": 2}, seats, sites("n0", "n1", "n2", "n3"))
    assert placed == {0: "n3", 1: "n2", 2: "n1", 3: "n0"}


def test_another_failure_domain_comes_before_other_coordinates() -> None:
    seats = {0: "n0", 1: "n1", 2: "n2", 3: "n3"}
    placed = place_partners(
        {"dp_shard": 2, "tp": 2},
        seats,
        [Site(f"n{i}", f"node-{i}", "ab"[i in (1, 2)], 2) for i in range(4)],
    )
    assert placed[0] in ("n1", "n2")


def test_a_link_that_failed_is_avoided() -> None:
    seats = {0: "n0", 1: "n1"}
    avoid = frozenset({("n0", "n1")})
    placed = place_partners({"tp": 2}, seats, sites("n0", "n1", "n2"), avoid)
    assert placed == {0: "n2", 1: "n0"}


@given(
    count=st.integers(1, 8),
    standbys=st.integers(0, 3),
    per_node=st.integers(1, 2),
    domains=st.integers(1, 3),
)
def test_never_the_own_node_and_never_nobody_while_there_is_another(
    count: int, standbys: int, per_node: int, domains: int
) -> None:
    everyone = [
        Site(f"n{i}", f"x{i}", f"d{i % domains}", per_node) for i in range(count + standbys)
    ]
    seats = {rank: f"n{rank // per_node}" for rank in range(count * per_node)}
    placed = place_partners({"dp_shard": count, "tp": per_node}, seats, everyone)
    for rank, partner in placed.items():
        assert (partner is None) == (len(everyone) == 1)
        assert partner != seats[rank]
        assert count == 1 or partner in seats.values()
    load = Counter(partner for partner in placed.values() if partner)
    assert count < 3 or domains > 1 or max(load.values()) <= 2 * per_node
