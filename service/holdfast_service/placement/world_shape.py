"""The shapes that a world may have: a mesh, and how its ranks are spread over nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from holdfast_service.placement.rank_assignment import (
    Assignment,
    CandidateNode,
    GroupHome,
    Shortage,
    assign,
)


@dataclass(frozen=True)
class WorldShape:
    """A mesh with at most `ranks_per_node` ranks on each node."""

    axes: tuple[tuple[str, int], ...]
    """Size of each mesh axis, outermost first."""
    ranks_per_node: int

    @classmethod
    def of(cls, mesh: Mapping[str, int], ranks_per_node: int) -> WorldShape:
        return cls(tuple(mesh.items()), ranks_per_node)

    @property
    def mesh(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def name(self) -> str:
        """E.g. "dp_shard 4 x tp 2"."""
        return " x ".join(f"{axis} {size}" for axis, size in self.axes)

    @property
    def mesh_name(self) -> str:
        """The name of the mesh in messages of agents, e.g. "dp_shard=4,tp=2"."""
        return ",".join(f"{axis}={size}" for axis, size in self.axes)

    @property
    def world_size(self) -> int:
        return prod(size for _, size in self.axes)

    @property
    def nodes(self) -> int:
        """Number of nodes that the world needs."""
        return -(-self.world_size // self.ranks_per_node)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that always share an agent, as blocks of consecutive ranks."""
        per_node = self.ranks_per_node
        return tuple(
            tuple(range(start, min(start + per_node, self.world_size)))
            for start in range(0, self.world_size, per_node)
        )

    @property
    def groups_together(self) -> int:
        """Number of consecutive groups that hold the ranks of the innermost axes that several nodes
        share: these exchange most."""
        inner = 1
        for _, size in reversed(self.axes):
            inner *= size
            if inner > self.ranks_per_node:
                break
        return max(1, inner // self.ranks_per_node) if inner % self.ranks_per_node == 0 else 1


@dataclass(frozen=True)
class ShapedAssignment:
    """The seats of all ranks of a world of this shape."""

    shape: WorldShape
    assignment: Assignment


def assign_best(
    shapes: Sequence[WorldShape],
    present: WorldShape,
    homes: Mapping[int, GroupHome],
    nodes: Sequence[CandidateNode],
) -> ShapedAssignment | Shortage:
    """The first of `shapes` whose ranks have room. Otherwise the ranks of the smallest one that
    have none.

    `present` is the shape of the last world, whose groups have `homes`: its processes keep their
    ranks. On another mesh, groups return to their homes, but a process is bound to its place in its
    mesh: one that had a rank can take none, one that was prepared for a rank only that rank.
    """
    short, fewest = Shortage(()), 0
    for shape in shapes:
        found = assign(
            shape.groups,
            homes if shape.ranks_per_node == present.ranks_per_node else {},
            [_without_bound_workers(node, shape, present) for node in nodes],
            shape.groups_together,
        )
        if isinstance(found, Assignment):
            return ShapedAssignment(shape, found)
        if not fewest or shape.nodes < fewest:
            short, fewest = found, shape.nodes
    return short


def _without_bound_workers(
    node: CandidateNode, shape: WorldShape, present: WorldShape
) -> CandidateNode:
    """The node without the processes that are bound to another mesh than that of `shape`."""
    fitting = (
        worker
        for worker in node.idle
        if worker.rank is None or (worker.mesh or present.mesh_name) == shape.mesh_name
    )
    return replace(node, idle=tuple(fitting))
