"""The meshes of a range of nodes: legal, best first; and the choice among them by the nodes."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.placement.mesh_choice import (
    MeshLimits,
    MeshRange,
    order_of_list,
    order_of_range,
)
from holdfast_service.placement.mesh_memory import MemoryModel
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
        "min_nodes": 2,
        "max_nodes": 8,
    }
    limits = {"ranks_per_node": 2, "micro_batches": 6}
    limits |= {name: changes.pop(name) for name in tuple(changes) if name in limits}  # type: ignore[misc]
    return MeshRange(**(fields | changes), limits=MeshLimits(**limits))  # type: ignore[arg-type]


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
        assert shape.mesh.get("dp_replicate", 1) * shape.mesh["dp_shard"] <= micro_batches
        assert [axis for axis in shape.mesh if axis != "dp_replicate"] == ["dp_shard", "tp"]
    legal = {count for count in range(least, least + more + 1) if not found.why_not(count)}
    assert {shape.nodes for shape in shapes} == legal


MODEL = MemoryModel(
    block=1000,
    blocks=4,
    whole=200,
    divided_activations=320,
    whole_activations=40,
    compute_bytes=4,
    gathers_blocks=False,
)


@given(
    tp=st.integers(1, 4),
    per_node=st.integers(1, 4),
    least=st.integers(1, 6),
    more=st.integers(0, 10),
    micro_batches=st.integers(1, 32),
    limit=st.integers(20_000, 120_000),
)
def test_every_number_of_nodes_has_a_mesh_or_a_reason_and_no_mesh_exceeds_the_memory(
    tp: int, per_node: int, least: int, more: int, micro_batches: int, limit: int
) -> None:
    limits = MeshLimits(per_node, micro_batches, MODEL, limit)
    found = MeshRange({"dp_shard": 1, "tp": tp}, "dp_shard", least, least + more, limits)
    order = order_of_range(found)
    legal = [mesh.shape.nodes for mesh in order.legal]
    refused = [nodes.nodes for nodes in order.refused]
    assert sorted(legal + refused) == list(range(least, least + more + 1))
    assert all(nodes.why for nodes in order.refused)
    assert all(mesh.why and "not measured" in mesh.why for mesh in order.legal)
    assert [mesh.shape for mesh in order.legal] == list(found.shapes())
    for mesh in order.legal:
        assert mesh.memory is not None
        assert mesh.memory <= limit
        assert mesh.memory == MODEL.of(mesh.shape.mesh, micro_batches).total


def test_a_mesh_that_needs_too_much_memory_is_refused_with_the_numbers() -> None:
    limits = MeshLimits(2, 6, MODEL, 35_000)
    found = MeshRange({"dp_shard": 1, "tp": 2}, "dp_shard", 1, 6, limits)
    assert [shape.nodes for shape in found.shapes()] == [6, 5, 4, 3]
    assert found.why_not(1).startswith("36 kB per rank (modelled, not measured: parameters 8.8 kB")
    assert found.why_not(1).endswith("memory_per_worker_bytes allows 35 kB")


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6, unique=True), st.integers(1, 9))
def test_a_list_is_the_order_and_more_room_never_gives_a_later_mesh(
    sizes: list[int], room: int
) -> None:
    limits = MeshLimits(1, 8)
    order = order_of_list([{"dp_shard": size, "tp": 1} for size in sizes], limits)
    legal = [mesh.shape.nodes for mesh in order.legal]
    assert legal == sorted(legal, reverse=True), "a later one is for less room"
    assert [size for size in sizes if size in legal] == legal
    assert len(order.legal) + len(order.refused) == len(sizes)
    fitting = [size for size in sizes if size <= room]
    assert next((nodes for nodes in legal if nodes <= room), None) == next(iter(fitting), None)


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
