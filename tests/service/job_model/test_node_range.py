"""`resources.nodes` and `auto`: resolved to the best mesh, and refused with what to do."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_service.errors import InvalidSpec
from holdfast_service.job_model.admission import NodeDemand
from holdfast_service.job_model.job_spec import parse

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
