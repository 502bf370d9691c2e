"""The meshes that a job with a range of nodes may train on, best first. Pure.

One axis changes its size; all others are fixed. More ranks are preferred: they share the global
batch, so that no step takes longer. A mesh is legal if its ranks fill whole nodes, and each has a
part of the global batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from holdfast_service.placement.world_shape import WorldShape


@dataclass(frozen=True)
class MeshRange:
    """A mesh of which one axis follows the number of nodes."""

    fixed: Mapping[str, int]
    """All axes in order; the size of `axis` is ignored."""
    axis: str
    ranks_per_node: int
    min_nodes: int
    max_nodes: int
    data_axes: tuple[str, ...]
    """The axes along which the micro-batches of a step are dealt."""
    micro_batches: int
    """Micro-batches of a step, over all ranks."""

    def shapes(self) -> tuple[WorldShape, ...]:
        """The legal shapes, the largest first."""
        counts = range(self.max_nodes, self.min_nodes - 1, -1)
        return tuple(self._shape_on(nodes) for nodes in counts if not self.why_not(nodes))

    def why_not(self, nodes: int) -> str:
        """Why no legal mesh fills this many nodes; "" if one does."""
        ranks, others = nodes * self.ranks_per_node, self._product(set(self.fixed) - {self.axis})
        if ranks % others:
            return f"{ranks} ranks are not a multiple of the other axes, {others}"
        mesh = self._shape_on(nodes).mesh
        parts = prod(mesh.get(axis, 1) for axis in self.data_axes)
        if parts > self.micro_batches:
            return f"{parts} ranks share only {self.micro_batches} micro-batches"
        return ""

    def _shape_on(self, nodes: int) -> WorldShape:
        others = self._product(set(self.fixed) - {self.axis})
        mesh = {**self.fixed, self.axis: nodes * self.ranks_per_node // others}
        return WorldShape.of(mesh, self.ranks_per_node)

    def _product(self, axes: set[str]) -> int:
        return prod(self.fixed[axis] for axis in axes)
