"""`resources.nodes` and `auto`: resolved to the best mesh, and refused with what to do."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_service.errors import InvalidSpec
from holdfast_service.job_model.admission import NodeDemand, stored_world_size
from holdfast_service.job_model.job_spec import parse
from holdfast_service.job_model.supervisor_protocol import Capacity, NodeCapacity

ELASTIC: dict[str, Any] = {
    "name": "elastic",
    "parallel": {"dp_shard": "auto", "tp": 2},
    "resources": {"nodes": {"min": 2, "max": 8}, "workers_per_node": 2, "standby_nodes": 1},
    "train": {"global_batch": 24, "micro_batch": 4},
}


def fault_of(document: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(InvalidSpec) as refused:
        parse(document, None)
    (fault,) = refused.value.faults
    return fault["path"], fault["message"]


def test_what_is_no_axis_does_not_change_the_size_of_a_job() -> None:
    for zero in (None, 3):
        spec = parse({"name": "x", "parallel": {"dp_shard": 4, "tp": 2, "zero": zero}}, None)
        stored = spec.model_dump(mode="json")
        assert stored_world_size(stored) == spec.parallel.world_size == 8
        assert NodeDemand.from_stored_spec(stored) == NodeDemand.from_spec(spec)


def test_auto_is_the_largest_legal_mesh_and_a_resolved_spec_means_the_same() -> None:
    spec = parse(ELASTIC, None)
    assert spec.parallel.mesh == {"dp_shard": 6, "tp": 2}
    assert [shape.mesh["dp_shard"] for shape in spec.shapes] == [6, 5, 4, 3, 2]
    assert (spec.nodes, spec.needed_nodes) == (7, 2)
    demand = NodeDemand.from_spec(spec)
    assert (demand.nodes, demand.to_start) == (7, 2)
    assert NodeDemand.from_stored_spec(spec.model_dump(mode="json")) == demand
    again = parse(spec.model_dump(mode="json"), None)
    assert again == spec
    assert again.shapes == spec.shapes


def test_replicas_can_be_the_axis_that_changes() -> None:
    document = {**ELASTIC, "parallel": {"dp_replicate": "auto", "dp_shard": 2}}
    spec = parse({**document, "resources": {"nodes": {"min": 2, "max": 6}}}, None)
    assert [shape.mesh for shape in spec.shapes] == [
        {"dp_replicate": 3, "dp_shard": 2, "tp": 1},
        {"dp_replicate": 2, "dp_shard": 2, "tp": 1},
        {"dp_shard": 2, "tp": 1},
    ]


def test_a_spec_without_a_range_has_one_shape() -> None:
    spec = parse({"name": "fixed", "parallel": {"dp_shard": 2}}, None)
    assert [shape.mesh for shape in spec.shapes] == [{"dp_shard": 2, "tp": 1}]
    assert spec.needed_nodes == spec.nodes


def test_faults_say_what_to_do() -> None:
    assert fault_of({**ELASTIC, "resources": {"workers_per_node": 2}}) == (
        "parallel.dp_shard",
        "auto needs a range of nodes: add resources.nodes with min and max",
    )
    both = {**ELASTIC, "parallel": {"dp_shard": "auto", "dp_replicate": "auto"}}
    assert fault_of(both)[0] == "parallel.dp_replicate"
    turned = {**ELASTIC, "resources": {"nodes": {"min": 9, "max": 8}, "workers_per_node": 2}}
    assert fault_of(turned) == ("resources.nodes.min", "min 9 exceeds max 8")
    fixed = {**ELASTIC, "parallel": {"dp_shard": 4, "tp": 2}}
    assert fault_of(fixed)[0] == "resources.nodes.max"
    assert "write dp_shard: auto" in fault_of(fixed)[1]
    few = {**ELASTIC, "train": {"global_batch": 4, "micro_batch": 4}}
    assert fault_of(few) == (
        "parallel.dp_shard",
        "no number of nodes from 2 to 8 gives a mesh; with 8: 8 ranks share only 1 micro-batches",
    )
    huge = {**ELASTIC, "resources": {"nodes": {"min": 1, "max": 10**12}, "workers_per_node": 2}}
    assert "resources.nodes.max" in fault_of(huge)[0]


def test_a_mesh_is_not_judged_by_defaults_of_invalid_numbers() -> None:
    wrong = {"train": {"global_batch": "24", "micro_batch": 4}}
    auto = {**ELASTIC, **wrong, "resources": {"nodes": {"min": 7, "max": 8}}}
    assert fault_of(auto)[0] == "train.global_batch"
    assert fault_of({**listed({"dp_shard": 5}), **wrong})[0] == "train.global_batch"


def test_the_smallest_mesh_is_the_least_number_of_nodes() -> None:
    spec = parse({**ELASTIC, "resources": {"nodes": {"min": 1, "max": 8}}}, None)
    assert (spec.resources.nodes and spec.resources.nodes.min, spec.needed_nodes) == (2, 2)
    fixed = spec.model_dump(mode="json")
    fixed["resources"]["nodes"]["min"] = 1
    assert fault_of(fixed) == (
        "resources.nodes.min",
        "no mesh trains on min 1 nodes: 1 ranks are not a multiple of the other axes, 2; "
        "write min: 2",
    )


def listed(*meshes: dict[str, int], **parallel: Any) -> dict[str, Any]:
    return {
        **ELASTIC,
        "parallel": {"dp_shard": "auto", "tp": 2, **parallel},
        "resources": {"nodes": {"preferred": list(meshes)}, "workers_per_node": 2},
    }


def test_listed_meshes_are_the_order_and_a_resolved_list_means_the_same() -> None:
    spec = parse(listed({"dp_shard": 4}, {"dp_shard": 1, "dp_replicate": 3}, {"dp_shard": 2}), None)
    assert [shape.mesh for shape in spec.shapes] == [
        {"dp_shard": 4, "tp": 2},
        {"dp_replicate": 3, "dp_shard": 1, "tp": 2},
        {"dp_shard": 2, "tp": 2},
    ]
    assert spec.parallel.mesh == {"dp_shard": 4, "tp": 2}
    assert (spec.nodes, spec.needed_nodes) == (4, 2)
    demand = NodeDemand.from_spec(spec)
    assert NodeDemand.from_stored_spec(spec.model_dump(mode="json")) == demand
    again = parse(spec.model_dump(mode="json"), None)
    assert again == spec
    assert again.shapes == spec.shapes


def test_both_axes_can_be_auto_if_each_listed_mesh_has_their_sizes() -> None:
    both = {"dp_replicate": "auto", "dp_shard": "auto"}
    spec = parse(listed({"dp_shard": 2, "dp_replicate": 2}, {"dp_shard": 1}), None)
    assert [shape.nodes for shape in spec.shapes] == [4, 1], "not listed: its size in parallel, 1"
    spec = parse(
        listed({"dp_shard": 2, "dp_replicate": 2}, {"dp_shard": 1, "dp_replicate": 1}, **both), None
    )
    assert spec.parallel.mesh == {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    assert fault_of(listed({"dp_shard": 2}, **both)) == (
        "resources.nodes.preferred.0",
        "it lacks dp_replicate, which is auto in parallel: give its size here",
    )


def test_a_listed_mesh_is_refused_at_its_place_with_the_nearest_legal_ones() -> None:
    assert fault_of(listed({"dp_shard": 5}, {"dp_shard": 9})) == (
        "resources.nodes.preferred.1",
        "dp_shard 9 x tp 2: 9 ranks share only 6 micro-batches; nearest legal: "
        "dp_shard 6 x tp 2 and dp_shard 5 x tp 2",
    )
    twice = fault_of(listed({"dp_shard": 5}, {"dp_shard": 5}))
    assert twice[0] == "resources.nodes.preferred.1"
    outside = listed({"dp_shard": 5}, {"dp_shard": 2})
    outside["resources"]["nodes"] |= {"min": 3, "max": 5}
    assert "it needs 2 nodes, and the range is 3 to 5" in fault_of(outside)[1]
    assert fault_of(listed({"dp_shard": 5}, dp_shard=4))[0] == "parallel"
    assert fault_of(listed({"dp_shard": 0}))[0] == "resources.nodes.preferred.0.dp_shard"


def test_a_mesh_after_one_that_needs_no_more_nodes_is_never_chosen_and_shown_so() -> None:
    spec = parse(listed({"dp_shard": 4}, {"dp_shard": 2, "dp_replicate": 2}, {"dp_shard": 2}), None)
    assert [shape.nodes for shape in spec.shapes] == [4, 2]
    order = spec.mesh_order()
    assert order is not None
    (refused,) = order.refused
    assert refused.mesh == "dp_replicate 2 x dp_shard 2 x tp 2"
    assert refused.why == "never chosen: dp_shard 4 x tp 2 stands before it and needs 4 nodes"


def test_memory_per_worker_refuses_meshes_and_a_job_whose_only_mesh_needs_more() -> None:
    limited = {**ELASTIC["resources"], "memory_per_worker_bytes": 35_000_000}
    spec = parse({**ELASTIC, "resources": limited}, None)
    assert [shape.mesh["dp_shard"] for shape in spec.shapes] == [6, 5]
    order = spec.mesh_order((2, 8))
    assert order is not None
    assert {refused.nodes for refused in order.refused} == {2, 3, 4, 7, 8}
    (four,) = (refused.why for refused in order.refused if refused.nodes == 4)
    assert four.startswith("35.3 MB per rank (modelled, not measured: parameters")
    too_little = {**limited, "memory_per_worker_bytes": 30_000_000}
    path, message = fault_of({**ELASTIC, "resources": too_little})
    assert path == "parallel.dp_shard"
    assert "with 6: 34.6 MB per rank" in message
    one = {"name": "one", "resources": {"memory_per_worker_bytes": 1_000_000}}
    path, message = fault_of(one)
    assert path == "resources.memory_per_worker_bytes"
    assert message.endswith("memory_per_worker_bytes allows 1 MB")


def test_a_scheduled_mesh_that_the_job_lacks_is_refused_whatever_the_capacity() -> None:
    nodes = {**ELASTIC["resources"]["nodes"], "schedule": [{"after_step": 0, "mesh": {"tp": 3}}]}
    document = {**ELASTIC, "resources": {**ELASTIC["resources"], "nodes": nodes}}
    there = tuple(NodeCapacity(f"n{number}", "host", cpus=8.0, gpus=0.0) for number in range(9))
    capacity = Capacity(there, can_grow=False)
    for known in (None, capacity):
        with pytest.raises(InvalidSpec) as refused:
            parse(document, known)
        (fault,) = refused.value.faults
        assert fault["path"] == "resources.nodes.schedule.0.mesh"
        assert fault["message"].startswith("the job has no such mesh: use one of dp_shard 6 x tp 2")
