"""The meshes that a job may train on, best first, with the reason for each place and each refusal.
Pure.

One axis follows the number of nodes and all others are fixed, or the meshes are listed. A mesh is
legal if its ranks fill whole nodes, each has a part of the global batch, and it needs no more
memory than allowed. More ranks are preferred, unless the list says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod

from holdfast_service.placement.mesh_axes import (
    Mesh,
    batch_ranks,
    passes,
    pipeline_ranks,
    without_optional,
)
from holdfast_service.placement.mesh_memory import MemoryModel
from holdfast_service.placement.mesh_throughput import modelled_speed
from holdfast_service.placement.world_shape import WorldShape
from holdfast_workers.byte_sizes import size_of

MAX_NEAREST = 2
NEAR_NODES = 64
"""How many nodes more or fewer a mesh that is named as near may need."""


@dataclass(frozen=True)
class MeshLimits:
    """The limits of every mesh of a job."""

    ranks_per_node: int
    micro_batches: int
    """Micro-batches of a step, over all ranks; 0: not known, as of a user's program."""
    memory: MemoryModel | None = None
    """The model of a rank's memory; None if it is not modelled, and not checked."""
    memory_limit: int | None = None
    """Bytes that a rank may need; None: not checked."""
    why_no_schedule: Callable[[int, int], str] = lambda _micro_batches, _stages: ""
    """Why a pipeline of so many stages cannot order the micro-batches of a data-parallel rank."""

    def why_not(self, mesh: Mesh) -> str:
        """Why a mesh is not legal; "" if it is."""
        ranks, parts = prod(mesh.values()), batch_ranks(mesh)
        if ranks % self.ranks_per_node:
            return f"{ranks} ranks do not fill whole nodes of {self.ranks_per_node} ranks"
        if not self.micro_batches:
            return self.why_too_large(mesh)
        if parts > self.micro_batches:
            return f"{parts} ranks share only {self.micro_batches} micro-batches"
        if why := self.why_no_schedule(passes(mesh, self.micro_batches), pipeline_ranks(mesh)):
            return why
        return self.why_too_large(mesh)

    def why_too_large(self, mesh: Mesh) -> str:
        """Why a rank of the mesh needs more memory than allowed; "" if it does not, or if that is
        not known."""
        if self.memory is None or self.memory_limit is None:
            return ""
        need = self.memory.of(mesh, self.micro_batches)
        if need.total <= self.memory_limit:
            return ""
        return f"{need.described}; memory_per_worker_bytes allows {size_of(self.memory_limit)}"

    def memory_of(self, mesh: Mesh) -> int | None:
        """Bytes that a rank needs; None: not known."""
        return self.memory.of(mesh, self.micro_batches).total if self.memory is not None else None

    def shape_of(self, mesh: Mesh) -> WorldShape:
        return WorldShape.of(without_optional(mesh), self.ranks_per_node)


@dataclass(frozen=True)
class MeshRange:
    """A mesh of which one axis follows the number of nodes."""

    fixed: Mapping[str, int]
    """All axes in order; the size of `axis` is ignored."""
    axis: str
    min_nodes: int
    max_nodes: int
    limits: MeshLimits

    def shapes(self) -> tuple[WorldShape, ...]:
        """The legal shapes, the largest first."""
        counts = range(self.max_nodes, self.min_nodes - 1, -1)
        return tuple(self._shape_on(nodes) for nodes in counts if not self.why_not(nodes))

    def why_not(self, nodes: int) -> str:
        """Why no legal mesh fills this many nodes; "" if one does."""
        ranks, others = nodes * self.limits.ranks_per_node, self._others()
        if ranks % others:
            return f"{ranks} ranks are not a multiple of the other axes, {others}"
        return self.limits.why_not(self._shape_on(nodes).mesh)

    def why_none(self) -> str:
        """Why no number of nodes is legal: the reason of the largest, and of the largest that only
        lacks memory."""
        counts = range(self.max_nodes, self.min_nodes - 1, -1)
        large = next((n for n in counts if self.why_not(n) == self._why_too_large(n)), None)
        named = dict.fromkeys((self.max_nodes, self.max_nodes if large is None else large))
        return "; ".join(f"with {nodes}: {self.why_not(nodes)}" for nodes in named)

    def nearest(self, mesh: Mesh) -> tuple[WorldShape, ...]:
        """The legal shapes with nearly as many ranks as `mesh`; the others as in `fixed`."""
        ranks, per_node = prod(mesh.values()), self.limits.ranks_per_node
        middle = min(max(ranks // per_node, self.min_nodes), self.max_nodes)
        near = range(
            max(self.min_nodes, middle - NEAR_NODES), min(self.max_nodes, middle + NEAR_NODES) + 1
        )
        by_distance = sorted(near, key=lambda nodes: (abs(nodes * per_node - ranks), -nodes))
        legal = (self._shape_on(nodes) for nodes in by_distance if not self.why_not(nodes))
        return tuple(islice(legal, MAX_NEAREST))

    def _why_too_large(self, nodes: int) -> str:
        return self.limits.why_too_large(self._shape_on(nodes).mesh)

    def _shape_on(self, nodes: int) -> WorldShape:
        size = nodes * self.limits.ranks_per_node // self._others()
        return self.limits.shape_of({**self.fixed, self.axis: size})

    def _others(self) -> int:
        return prod(size for name, size in self.fixed.items() if name != self.axis)


@dataclass(frozen=True)
class LegalMesh:
    """A mesh of a job, and why it has its place in their order."""

    shape: WorldShape
    why: str
    memory: int | None
    """Bytes that a rank needs, modelled; None: not known."""


@dataclass(frozen=True)
class RefusedNodes:
    """A number of nodes, or a listed mesh, on which the job never trains, and why."""

    nodes: int
    mesh: str
    """Empty if no mesh was listed."""
    why: str


@dataclass(frozen=True)
class MeshOrder:
    """The answer to a user: all meshes of a job in order, and what was refused."""

    legal: tuple[LegalMesh, ...]
    refused: tuple[RefusedNodes, ...]


def order_of_range(found: MeshRange) -> MeshOrder:
    """The meshes of a range of nodes."""
    counts = range(found.max_nodes, found.min_nodes - 1, -1)
    refused = [RefusedNodes(n, "", why) for n in counts if (why := found.why_not(n))]
    return MeshOrder(_explained(found.shapes(), found.limits, "by throughput"), tuple(refused))


def order_of_list(meshes: Sequence[Mesh], limits: MeshLimits) -> MeshOrder:
    """The listed meshes, all legal by themselves."""
    shapes = reachable(tuple(map(limits.shape_of, meshes)))
    refused = [
        RefusedNodes(shape.nodes, shape.name, _why_unreachable(shape, shapes))
        for shape in map(limits.shape_of, meshes)
        if shape not in shapes
    ]
    return MeshOrder(_explained(shapes, limits, "of the list"), tuple(refused))


def reachable(shapes: Sequence[WorldShape]) -> tuple[WorldShape, ...]:
    """The `shapes`, in order of preference, that need fewer nodes than all before them: no other is
    ever chosen."""
    kept: list[WorldShape] = []
    for shape in shapes:
        if not kept or shape.nodes < kept[-1].nodes:
            kept.append(shape)
    return tuple(kept)


def _why_unreachable(shape: WorldShape, kept: Sequence[WorldShape]) -> str:
    before = max((other for other in kept if other.nodes <= shape.nodes), key=lambda s: s.nodes)
    return f"never chosen: {before.name} stands before it and needs {before.nodes} nodes"


def _explained(
    shapes: Sequence[WorldShape], limits: MeshLimits, order: str
) -> tuple[LegalMesh, ...]:
    """`shapes` in their order, with the model's figures for each."""
    fastest = max((modelled_speed(s, limits.micro_batches) for s in shapes), default=1.0)

    def why(at: int, shape: WorldShape) -> str:
        count, dealt = passes(shape.mesh, limits.micro_batches), batch_ranks(shape.mesh)
        share = modelled_speed(shape, limits.micro_batches) / fastest
        if not limits.micro_batches:
            return f"place {at} {order}: {share:.0%} of the fastest, if each rank adds as much"
        return (
            f"place {at} {order}: {count} {'pass' if count == 1 else 'passes'} per step "
            f"({limits.micro_batches} micro-batches dealt to {dealt}), {share:.0%} of the fastest; "
            "modelled, not measured"
        )

    return tuple(
        LegalMesh(shape, why(at, shape), limits.memory_of(shape.mesh))
        for at, shape in enumerate(shapes, 1)
    )
