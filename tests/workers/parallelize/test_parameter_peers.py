"""Which ranks are peers, and which of them computes a whole tensor."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.parallelize.parameter_peers import owners_of, peers_of
from holdfast_workers.training.recipe import World


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_the_work_is_divided_and_no_rank_has_much_more_than_its_part(
    costs: list[int], ranks: int
) -> None:
    owners = owners_of(costs, ranks)
    loads = [
        sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank)
        for rank in range(ranks)
    ]
    assert len(owners) == len(costs) and sum(loads) == sum(costs)
    assert max(loads) - min(loads) <= max(costs, default=0)
    assert owners_of(costs, ranks) == owners


def test_peers_are_of_one_replica_and_stage() -> None:
    mesh = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "tp": 2}
    world = World(5, 16, mesh, 1, "cpu")
    assert [peer.rank for peer in peers_of(world)] == [4, 5, 6, 7]
    alone = World(1, 2, {"dp_replicate": 2, "dp_shard": 1, "tp": 1}, 1, "cpu")
    assert [peer.rank for peer in peers_of(alone)] == [1]
