"""A job's range of nodes: the key `resources.nodes`, and `auto` as the size of a mesh axis.

`auto` is resolved when a document is read: the resolved spec states the best mesh in numbers, and
`resources.nodes.axis` the axis that changes. So a resolved spec that is submitted again means the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from holdfast_service.placement.mesh_choice import MeshRange
from holdfast_service.placement.world_shape import WorldShape
from holdfast_workers.spec import ParallelSpec, Section, SpecFault, TrainSpec

MAX_NODES = 4096
AUTO = "auto"
ElasticAxis = Literal["dp_replicate", "dp_shard"]
ELASTIC_AXES: tuple[ElasticAxis, ...] = ("dp_replicate", "dp_shard")

NodeCount = Annotated[int, Field(ge=1, le=MAX_NODES)]


class NodeRange(Section):
    """The numbers of nodes on which the job may train."""

    min: NodeCount = Field(description="Fewest nodes that train; with fewer, the job waits.")
    max: NodeCount = Field(description="Most nodes that train, without standby nodes.")
    axis: ElasticAxis = Field(
        default="dp_shard", description="The mesh axis that follows the number of nodes."
    )


@dataclass(frozen=True)
class ResolvedDocument:
    """A document with the best mesh in place of `auto`."""

    document: Mapping[str, Any]
    fault: SpecFault | None = None
    """Why `auto` could not be resolved; the axis has size 1 then."""


def resolve_auto(document: Mapping[str, Any]) -> ResolvedDocument:
    """Resolve `auto`. A document without it is returned as it is; so is an invalid number, which
    is reported for itself."""
    parallel = document.get("parallel")
    elastic = (
        [axis for axis in ELASTIC_AXES if parallel.get(axis) == AUTO]
        if isinstance(parallel, Mapping)
        else []
    )
    if not elastic:
        return ResolvedDocument(document)
    assert isinstance(parallel, Mapping)
    axis = elastic[0]
    without = {**document, "parallel": {**parallel, **dict.fromkeys(elastic, 1)}}
    resources = document.get("resources")
    nodes = resources.get("nodes") if isinstance(resources, Mapping) else None
    if len(elastic) > 1:
        message = "only one of dp_replicate and dp_shard can be auto: give the other a size"
        return ResolvedDocument(without, SpecFault(path=f"parallel.{axis}", message=message))
    if not isinstance(nodes, Mapping):
        message = "auto needs a range of nodes: add resources.nodes with min and max"
        return ResolvedDocument(without, SpecFault(path=f"parallel.{axis}", message=message))
    found = _range(without, nodes, axis)
    if found is None or found.min_nodes > found.max_nodes:
        return ResolvedDocument(without)
    shapes = found.shapes()
    if not shapes:
        message = (
            f"no number of nodes from {found.min_nodes} to {found.max_nodes} gives a mesh; "
            f"with {found.max_nodes}: {found.why_not(found.max_nodes)}"
        )
        return ResolvedDocument(without, SpecFault(path=f"parallel.{axis}", message=message))
    best = {**nodes, "max": shapes[0].nodes, "axis": axis}
    return ResolvedDocument(
        {
            **document,
            "parallel": {**parallel, axis: shapes[0].mesh[axis]},
            "resources": {**document["resources"], "nodes": best},
        }
    )


def shapes_in(
    nodes: NodeRange, parallel: ParallelSpec, train: TrainSpec, ranks_per_node: int
) -> tuple[WorldShape, ...]:
    """The shapes that a job's world may have, best first; the first is the mesh `parallel`."""
    own = WorldShape.of(parallel.mesh, ranks_per_node)
    found = MeshRange(
        fixed={"dp_replicate": parallel.dp_replicate, **parallel.mesh},
        axis=nodes.axis,
        ranks_per_node=ranks_per_node,
        min_nodes=nodes.min,
        max_nodes=own.nodes - 1,
        data_axes=ELASTIC_AXES,
        micro_batches=train.global_batch // train.micro_batch,
    )
    return (own, *(_without_trivial_replicas(shape) for shape in found.shapes()))


def _range(
    document: Mapping[str, Any], nodes: Mapping[str, Any], axis: ElasticAxis
) -> MeshRange | None:
    """The range in a document that is not validated; None if a number is invalid."""
    parallel, resources = document["parallel"], document["resources"]
    train = document.get("train", {})
    if not isinstance(train, Mapping):
        return None
    sizes = {name: parallel.get(name, 1) for name in (*ELASTIC_AXES, "tp")}
    numbers = {
        "per_node": resources.get("workers_per_node", 1),
        "min": nodes.get("min"),
        "max": nodes.get("max"),
        "global": train.get("global_batch", 16),
        "micro": train.get("micro_batch", 4),
    }
    if not all(_is_count(number) for number in (*sizes.values(), *numbers.values())):
        return None
    if numbers["max"] > MAX_NODES:
        return None
    return MeshRange(
        fixed=sizes,
        axis=axis,
        ranks_per_node=numbers["per_node"],
        min_nodes=numbers["min"],
        max_nodes=numbers["max"],
        data_axes=ELASTIC_AXES,
        micro_batches=numbers["global"] // numbers["micro"],
    )


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _without_trivial_replicas(shape: WorldShape) -> WorldShape:
    """`dp_replicate` is an axis only if there are replicas."""
    axes = tuple((axis, size) for axis, size in shape.axes if (axis, size) != ("dp_replicate", 1))
    return WorldShape(axes, shape.ranks_per_node)
