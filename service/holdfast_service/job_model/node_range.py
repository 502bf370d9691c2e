"""A job's range of nodes: the key `resources.nodes`, and `auto` as the size of a mesh axis.

`auto` is resolved when a document is read: the resolved spec states the best mesh in numbers, and
`resources.nodes` the axis that changes, or all sizes of the listed meshes. So a resolved spec that
is submitted again means the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from holdfast_service.job_model.mesh_history import larger_axes
from holdfast_service.placement.mesh_axes import MESH_AXES
from holdfast_service.placement.mesh_choice import (
    MeshLimits,
    MeshOrder,
    MeshRange,
    order_of_list,
    order_of_range,
    reachable,
)
from holdfast_service.placement.world_shape import WorldShape
from holdfast_workers.spec import AMOUNTS, ParallelSpec, Section, SpecFault

MAX_NODES = 4096
MAX_PREFERRED = 64
AUTO = "auto"
ElasticAxis = Literal["dp_replicate", "dp_shard"]
ELASTIC_AXES: tuple[str, ...] = tuple(axis.name for axis in MESH_AXES if axis.may_change)

_MESHES_LISTED = 8
MeshKey = tuple[tuple[str, int], ...]

NodeCount = Annotated[int, Field(ge=1, le=MAX_NODES)]
AxisSize = Annotated[int, Field(ge=1, le=2**20)]


class PreferredMesh(Section):
    """A mesh on which the job may train: the sizes of the axes that may change."""

    dp_replicate: AxisSize | None = Field(default=None, description="null: its size in `parallel`.")
    dp_shard: AxisSize | None = Field(default=None, description="null: its size in `parallel`.")


class ScheduledMesh(Section):
    """The mesh of the steps after `after_step`."""

    after_step: Annotated[int, Field(ge=0)] = Field(
        description="The mesh holds from the step after this one on; 0 for the first entry."
    )
    mesh: dict[str, Annotated[int, Field(ge=1)]] = Field(
        max_length=8,
        description="Size of each axis, e.g. {dp_shard: 2, tp: 2}; axes of size 1 may be left out.",
    )


class NodeRange(Section):
    """The numbers of nodes on which the job may train."""

    min: NodeCount = Field(description="Fewest nodes that train; with fewer, the job waits.")
    max: NodeCount = Field(description="Most nodes that train, without standby nodes.")
    axis: ElasticAxis = Field(
        default="dp_shard", description="The mesh axis that follows the number of nodes."
    )
    preferred: tuple[PreferredMesh, ...] = Field(
        default=(),
        max_length=MAX_PREFERRED,
        description="The meshes on which the job may train, best first, instead of every size of "
        "`axis`; `min` and `max` may then be left out.",
    )
    schedule: list[ScheduledMesh] = Field(
        default_factory=list,
        max_length=10_000,
        description="The mesh of each step, fixed in advance: the world changes exactly there, and "
        "waits for the nodes that it needs. Empty: the mesh follows the nodes that are there.",
    )


@dataclass(frozen=True)
class AutoSizes:
    """A document without `auto`, and what its author left to Holdfast."""

    document: Mapping[str, Any]
    axes: tuple[str, ...] = ()
    """The axes that are `auto`; the document has the size 1 for each."""
    absent: tuple[str, ...] = ()
    """The axes without a size in the document, which may follow a list."""
    is_listed: bool = False
    """Whether meshes are listed."""
    has_open_ends: bool = False
    """Whether `min` and `max` follow from the list."""


@dataclass(frozen=True)
class ResolvedMesh:
    """The mesh in numbers, or the reason why there is none."""

    parallel: ParallelSpec
    nodes: NodeRange | None
    fault: SpecFault | None = None
    is_of_numbers: bool = False
    """Whether the fault follows from other numbers of the document."""


def without_auto(document: Mapping[str, Any]) -> AutoSizes:
    """Take `auto` out of a document that is not validated."""
    parallel, resources = document.get("parallel"), document.get("resources")
    nodes = resources.get("nodes") if isinstance(resources, Mapping) else None
    axes: tuple[str, ...] = ()
    absent = ELASTIC_AXES
    if isinstance(parallel, Mapping):
        absent = tuple(axis for axis in ELASTIC_AXES if axis not in parallel)
        axes = tuple(axis for axis in ELASTIC_AXES if parallel.get(axis) == AUTO)
    if axes:
        document = {**document, "parallel": {**parallel, **dict.fromkeys(axes, 1)}}  # type: ignore[dict-item]
    is_listed = isinstance(nodes, Mapping) and bool(nodes.get("preferred"))
    if not is_listed:
        return AutoSizes(document, axes)
    assert isinstance(nodes, Mapping)
    assert isinstance(resources, Mapping)
    has_open_ends = "min" not in nodes and "max" not in nodes
    if has_open_ends:
        nodes = {"min": 1, "max": MAX_NODES, **nodes}
    document = {**document, "resources": {**resources, "nodes": nodes}}
    return AutoSizes(document, axes, absent, is_listed=True, has_open_ends=has_open_ends)


def resolve(
    auto: AutoSizes, parallel: ParallelSpec, nodes: NodeRange | None, limits: MeshLimits
) -> ResolvedMesh:
    """The best mesh in numbers, in place of what `auto` left open in a validated document."""
    if auto.is_listed:
        if nodes is None or not nodes.preferred:
            return ResolvedMesh(parallel, None)  # the list is invalid, which is reported for itself
        return _resolve_list(auto, parallel, nodes, limits)
    fault = _auto_fault(auto, nodes)
    if not auto.axes or nodes is None or fault is not None:
        return ResolvedMesh(parallel, nodes, fault)
    nodes = nodes.model_copy(update={"axis": auto.axes[0]})
    found = _range(nodes, parallel, limits)
    shapes = found.shapes()
    if not shapes:
        message = (
            f"no number of nodes from {nodes.min} to {nodes.max} gives a mesh; {found.why_none()}"
        )
        fault = SpecFault(path=f"parallel.{nodes.axis}", message=message)
        return ResolvedMesh(parallel, nodes, fault, is_of_numbers=True)
    ends = {"min": shapes[-1].nodes, "max": shapes[0].nodes}
    size: dict[str, int] = {nodes.axis: shapes[0].mesh.get(nodes.axis, 1)}
    return ResolvedMesh(parallel.model_copy(update=size), nodes.model_copy(update=ends))


def shapes_in(
    nodes: NodeRange, parallel: ParallelSpec, limits: MeshLimits
) -> tuple[WorldShape, ...]:
    """The shapes that a job's world may have, best first, each on fewer nodes than the one before;
    the first is the mesh `parallel`."""
    own = limits.shape_of(parallel.mesh)
    if nodes.preferred:
        meshes = _listed_meshes(nodes, parallel)
        return reachable(tuple(map(limits.shape_of, meshes)))
    found = _range(nodes.model_copy(update={"max": own.nodes - 1}), parallel, limits)
    return (own, *found.shapes())


def schedule_faults(
    nodes: NodeRange, shapes: Sequence[WorldShape], steps: int | None
) -> tuple[SpecFault, ...]:
    """The faults of the schedule of meshes. `steps` None: not known yet."""
    found = []
    legal = shapes_by_mesh(shapes)
    before = -1
    for index, entry in enumerate(nodes.schedule):
        path = f"resources.nodes.schedule.{index}"
        if index == 0 and entry.after_step:
            message = "the first entry must be after step 0: it is the mesh of the first step"
            found.append(SpecFault(path=f"{path}.after_step", message=message))
        if entry.after_step <= before or (steps is not None and entry.after_step >= steps):
            most = "" if steps is None else f" and less than {steps} steps"
            message = f"{entry.after_step} must be more than {before}{most}"
            found.append(SpecFault(path=f"{path}.after_step", message=message, beside=AMOUNTS))
        if mesh_key(entry.mesh) not in legal:
            names = "; ".join(shape.name for shape in shapes[:_MESHES_LISTED])
            message = f"the job has no such mesh: use one of {names}"
            found.append(SpecFault(path=f"{path}.mesh", message=message))
        before = max(before, entry.after_step)
    return tuple(found)


def scheduled_shapes(
    nodes: NodeRange, shapes: Sequence[WorldShape]
) -> tuple[tuple[int, WorldShape], ...]:
    """(step, shape of the world after it), in order. A mesh that the job does not have is left out:
    `schedule_faults` reports it."""
    by_mesh = shapes_by_mesh(shapes)
    found = ((entry.after_step, by_mesh.get(mesh_key(entry.mesh))) for entry in nodes.schedule)
    return tuple((step, shape) for step, shape in found if shape is not None)


def shapes_by_mesh(shapes: Sequence[WorldShape]) -> dict[MeshKey, WorldShape]:
    return {mesh_key(shape.mesh): shape for shape in shapes}


def mesh_key(mesh: Mapping[str, int]) -> MeshKey:
    """Equal for the same mesh; axes of size 1 have no effect."""
    return tuple(larger_axes(mesh).items())


def order_in(nodes: NodeRange, parallel: ParallelSpec, limits: MeshLimits) -> MeshOrder:
    """All meshes of a job in order, with reasons, and what was refused."""
    if nodes.preferred:
        return order_of_list(_listed_meshes(nodes, parallel), limits)
    return order_of_range(_range(nodes, parallel, limits))


def range_faults(nodes: NodeRange, parallel: ParallelSpec, limits: MeshLimits) -> list[SpecFault]:
    """The faults of a resolved range: of its ends, and of each listed mesh."""
    own = limits.shape_of(parallel.mesh)
    if nodes.min > nodes.max:
        return [_turned(nodes)]
    if nodes.preferred:
        return _list_faults(nodes, parallel, limits)
    if nodes.max != own.nodes:
        message = (
            f"max {nodes.max} does not match the mesh {parallel.product}, which trains on "
            f"{own.nodes} nodes: write {nodes.axis}: auto"
        )
        return [SpecFault(path="resources.nodes.max", message=message)]
    smallest = shapes_in(nodes, parallel, limits)[-1].nodes
    if nodes.min != smallest:
        why = _range(nodes, parallel, limits).why_not(nodes.min)
        message = f"no mesh trains on min {nodes.min} nodes: {why}; write min: {smallest}"
        return [SpecFault(path="resources.nodes.min", message=message)]
    return []


def _auto_fault(auto: AutoSizes, nodes: NodeRange | None) -> SpecFault | None:
    """Why `auto` says nothing in this document."""
    if len(auto.axes) > 1:
        message = (
            "only one of dp_replicate and dp_shard can be auto: give the other a size, or list the "
            "meshes in resources.nodes.preferred"
        )
        return SpecFault(path=f"parallel.{auto.axes[0]}", message=message)
    if auto.axes and nodes is None:
        message = "auto needs a range of nodes: add resources.nodes with min and max"
        return SpecFault(path=f"parallel.{auto.axes[0]}", message=message)
    return _turned(nodes) if auto.axes and nodes is not None and nodes.min > nodes.max else None


def _turned(nodes: NodeRange) -> SpecFault:
    message = f"min {nodes.min} exceeds max {nodes.max}"
    return SpecFault(path="resources.nodes.min", message=message)


def _resolve_list(
    auto: AutoSizes, parallel: ParallelSpec, nodes: NodeRange, limits: MeshLimits
) -> ResolvedMesh:
    """Each listed mesh with the sizes of all axes that may change; the first is the job's mesh."""
    completed = []
    for at, listed in enumerate(nodes.preferred):
        given = {axis: getattr(listed, axis) for axis in ELASTIC_AXES}
        for axis in auto.axes:
            if given[axis] is None:
                message = f"it lacks {axis}, which is auto in parallel: give its size here"
                path = f"resources.nodes.preferred.{at}"
                return ResolvedMesh(parallel, nodes, SpecFault(path=path, message=message))
        sizes = {axis: size or getattr(parallel, axis) for axis, size in given.items()}
        completed.append(PreferredMesh(**sizes))
    first = {axis: getattr(completed[0], axis) for axis in (*auto.axes, *auto.absent)}
    parallel = parallel.model_copy(update=first)
    nodes = nodes.model_copy(update={"preferred": tuple(completed)})
    counts = [limits.shape_of(mesh).nodes for mesh in _listed_meshes(nodes, parallel)]
    if auto.has_open_ends or (nodes.min <= min(counts) and max(counts) <= nodes.max <= MAX_NODES):
        ends = {"min": min(counts), "max": min(max(counts), MAX_NODES)}
        nodes = nodes.model_copy(update=ends)
    return ResolvedMesh(parallel, nodes)


def _list_faults(nodes: NodeRange, parallel: ParallelSpec, limits: MeshLimits) -> list[SpecFault]:
    meshes = _listed_meshes(nodes, parallel)
    found = []
    for at, mesh in enumerate(meshes):
        why = _why_not_listed(at, meshes, nodes, limits)
        if why:
            path = f"resources.nodes.preferred.{at}"
            found.append(SpecFault(path=path, message=f"{limits.shape_of(mesh).name}: {why}"))
    first = meshes[0]
    if not found and any(getattr(parallel, axis) != first[axis] for axis in ELASTIC_AXES):
        message = (
            f"the mesh {parallel.product} is not the first of resources.nodes.preferred, "
            f"{limits.shape_of(first).name}: write auto for the sizes that are listed"
        )
        found.append(SpecFault(path="parallel", message=message, beside=("resources.nodes",)))
    return found


def _why_not_listed(
    at: int, meshes: Sequence[Mapping[str, int]], nodes: NodeRange, limits: MeshLimits
) -> str:
    mesh = meshes[at]
    if mesh in meshes[:at]:
        return f"it is listed twice, first as preferred.{meshes.index(mesh)}: remove one"
    why, count = limits.why_not(mesh), limits.shape_of(mesh).nodes
    if not why and not nodes.min <= count <= nodes.max:
        why = f"it needs {count} nodes, and the range is {nodes.min} to {nodes.max}"
    if not why:
        return ""
    near = MeshRange(mesh, nodes.axis, nodes.min, nodes.max, limits).nearest(mesh)
    names = " and ".join(shape.name for shape in near)
    return f"{why}; nearest legal: {names}" if near else f"{why}; no {nodes.axis} is legal"


def _listed_meshes(nodes: NodeRange, parallel: ParallelSpec) -> list[dict[str, int]]:
    sizes = _all_axes(parallel)
    return [{**sizes, **listed.model_dump(exclude_none=True)} for listed in nodes.preferred]


def _range(nodes: NodeRange, parallel: ParallelSpec, limits: MeshLimits) -> MeshRange:
    return MeshRange(_all_axes(parallel), nodes.axis, nodes.min, nodes.max, limits)


def _all_axes(parallel: ParallelSpec) -> dict[str, int]:
    return {axis.name: getattr(parallel, axis.name) for axis in MESH_AXES}
