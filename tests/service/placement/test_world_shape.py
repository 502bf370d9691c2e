"""The nodes whose ranks exchange most, by the mesh."""

from __future__ import annotations

import pytest

from holdfast_service.placement.rank_assignment import CandidateNode
from holdfast_service.placement.world_shape import ShapedAssignment, WorldShape, assign_best


@pytest.mark.parametrize(
    ("mesh", "per_node", "together"),
    [
        ({"dp_shard": 2, "tp": 2}, 2, 2),  # the shards of all nodes; tensor groups share a node
        ({"dp_shard": 4, "tp": 4}, 2, 2),  # a tensor group on two nodes
        ({"pp": 2, "dp_shard": 2, "cp": 2, "tp": 2}, 2, 2),  # a ring
        ({"dp_replicate": 4, "dp_shard": 4, "tp": 1}, 1, 4),  # the shards of a replica
        ({"dp_shard": 1, "tp": 1}, 1, 1),
        ({"dp_shard": 2, "tp": 3}, 2, 1),  # tensor groups do not begin with nodes
        ({"dp_shard": 1, "tp": 2}, 8, 1),
    ],
)
def test_groups_together_hold_the_innermost_axes_that_nodes_share(
    mesh: dict[str, int], per_node: int, together: int
) -> None:
    assert WorldShape.of(mesh, per_node).groups_together == together


def test_a_tensor_group_on_two_nodes_is_not_divided_between_fast_domains() -> None:
    nodes = [CandidateNode(f"n{i}", f"switch-{i // 3}", 2, ready=True) for i in range(6)]
    shape = WorldShape.of({"dp_shard": 2, "tp": 4}, 2)
    found = assign_best((shape,), shape, {}, nodes)
    assert isinstance(found, ShapedAssignment)
    switch = {placed.rank: int(placed.agent[1:]) // 3 for placed in found.assignment.placed}
    assert len({switch[rank] for rank in range(4)}) == 1
    assert len({switch[rank] for rank in range(4, 8)}) == 1
