"""The meshes of a range of nodes: legal, best first; and the choice among them by the nodes."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.placement.mesh_choice import MeshRange
from holdfast_service.placement.rank_assignment import (
    CandidateNode,
    GroupHome,
    IdleWorker,
    Shortage,
)
from holdfast_service.placement.world_shape import ShapedAssignment, WorldShape, assign_best

SHAPES = tuple(WorldShape.of({"dp_shard": ranks}, 1) for ranks in (4, 3, 2))


def mesh_range(**changes: object) -> MeshRange:
    fields = {
        "fixed": {"dp_replicate": 1, "dp_shard": 1, "tp": 2},
        "axis": "dp_shard",
        "ranks_per_node": 2,
        "min_nodes": 2,
        "max_nodes": 8,
        "data_axes": ("dp_replicate", "dp_shard"),
        "micro_batches": 6,
    }
    return MeshRange(**(fields | changes))  # type: ignore[arg-type]


def nodes(count: int, **options: object) -> list[CandidateNode]:
    return [
        CandidateNode(f"n{at}", "", 1, ready=True, **options)  # type: ignore[arg-type]
        for at in range(count)
    ]


def test_the_largest_mesh_is_preferred_and_every_rank_has_a_micro_batch() -> None:
    assert [shape.mesh["dp_shard"] for shape in mesh_range().shapes()] == [6, 5, 4, 3, 2]
    assert mesh_range().why_not(8) == "8 ranks share only 6 micro-batches"


def test_ranks_that_do_not_fill_the_other_axes_are_refused_with_the_numbers() -> None:
    odd = mesh_range(ranks_per_node=1, min_nodes=3, max_nodes=3)
    assert odd.shapes() == ()
    assert odd.why_not(3) == "3 ranks are not a multiple of the other axes, 2"


@given(
    tp=st.integers(1, 4),
    replicas=st.integers(1, 3),
    per_node=st.integers(1, 8),
    least=st.integers(1, 12),
    more=st.integers(0, 12),
    micro_batches=st.integers(1, 64),
    axis=st.sampled_from(("dp_shard", "dp_replicate")),
)
def test_every_shape_is_legal_and_no_legal_one_is_missing(
    tp: int, replicas: int, per_node: int, least: int, more: int, micro_batches: int, axis: str
) -> None:
    found = mesh_range(
        fixed={"dp_replicate": replicas, "dp_shard": replicas, "tp": tp},
        axis=axis,
        ranks_per_node=per_node,
        min_nodes=least,
        max_nodes=least + more,
        micro_batches=micro_batches,
    )
    shapes = found.shapes()
    assert [shape.nodes for shape in shapes] == sorted((s.nodes for s in shapes), reverse=True)
    for shape in shapes:
        assert prod(shape.mesh.values()) == shape.nodes * per_node
        assert shape.mesh["tp"] == tp
        assert shape.mesh["dp_replicate"] * shape.mesh["dp_shard"] <= micro_batches
        assert list(shape.mesh) == ["dp_replicate", "dp_shard", "tp"]
    legal = {count for count in range(least, least + more + 1) if not found.why_not(count)}
    assert {shape.nodes for shape in shapes} == legal


def test_the_best_mesh_with_room_is_chosen_and_processes_bound_to_another_are_not_reused() -> None:
    homes = {at: GroupHome(f"n{at}", "", alive=True) for at in range(3)}
    bound = (IdleWorker("w", rank=0), IdleWorker("spare", rank=1, spare=True), IdleWorker("free"))
    found = assign_best(SHAPES, SHAPES[0], homes, nodes(3, idle=bound))
    assert isinstance(found, ShapedAssignment)
    assert found.shape == SHAPES[1]
    assert {placed.worker for placed in found.assignment.placed} == {"free"}
    assert found.assignment.moved == ()
    same = assign_best(SHAPES, SHAPES[1], homes, nodes(3, idle=bound))
    assert isinstance(same, ShapedAssignment)
    assert same.assignment.placed[0].worker == "w"


def test_too_few_nodes_for_the_smallest_mesh_are_a_shortage() -> None:
    assert assign_best(SHAPES, SHAPES[0], {}, nodes(1)) == Shortage((1,))
