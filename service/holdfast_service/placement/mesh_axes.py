"""The axes that a mesh can have, as data: which may change their size, and what each divides. Pure.

A further axis is one more entry of `MESH_AXES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class MeshAxis:
    """A kind of axis. Ranks along it differ in what it divides, and are equal in all else."""

    name: str
    may_change: bool = False
    """Whether its size may follow the number of nodes."""
    deals_batches: bool = False
    """The micro-batches of a step are dealt among its ranks."""
    shards_state: bool = False
    """Each of its ranks keeps a part of every parameter."""
    divides_layers: bool = False
    """Each of its ranks has some of the layers."""
    divides_sequence: bool = False
    """Each of its ranks computes some of the positions of every micro-batch."""
    splits_layers: bool = False
    """Each of its ranks computes a part of every layer, for the same micro-batch."""
    is_optional: bool = False
    """Whether a mesh has the axis only if its size exceeds 1."""


MESH_AXES = (
    MeshAxis("pp", divides_layers=True, is_optional=True),
    MeshAxis("dp_replicate", may_change=True, deals_batches=True, is_optional=True),
    MeshAxis("dp_shard", may_change=True, deals_batches=True, shards_state=True),
    MeshAxis("cp", shards_state=True, divides_sequence=True, is_optional=True),
    MeshAxis("tp", splits_layers=True),
)
"""The axes of a mesh, outermost first."""

Mesh = Mapping[str, int]
"""Axis → its size. An axis that is not named has the size 1."""


def batch_ranks(mesh: Mesh) -> int:
    """Number of ranks, or groups of ranks, among which the micro-batches of a step are dealt."""
    return prod(mesh.get(axis.name, 1) for axis in MESH_AXES if axis.deals_batches)


def is_replicated_only(mesh: Mesh) -> bool:
    """Whether all ranks keep the whole state, and there are several."""
    return prod(mesh.values()) == mesh.get("dp_replicate", 1) > 1


def state_shards(mesh: Mesh) -> int:
    """Number of parts of a parameter that every layer has whole."""
    return prod(mesh.get(axis.name, 1) for axis in MESH_AXES if axis.shards_state)


def pipeline_ranks(mesh: Mesh) -> int:
    """Number of ranks, or groups of ranks, among which the layers are dealt."""
    return prod(mesh.get(axis.name, 1) for axis in MESH_AXES if axis.divides_layers)


def sequence_parts(mesh: Mesh) -> int:
    """Number of parts of each sequence."""
    return prod(mesh.get(axis.name, 1) for axis in MESH_AXES if axis.divides_sequence)


def layer_parts(mesh: Mesh) -> int:
    """Number of parts of a layer."""
    return prod(mesh.get(axis.name, 1) for axis in MESH_AXES if axis.splits_layers)


def passes(mesh: Mesh, micro_batches: int) -> int:
    """Forward passes of a step: those of the ranks with most micro-batches."""
    return -(-micro_batches // batch_ranks(mesh))


def without_optional(mesh: Mesh) -> dict[str, int]:
    """`mesh` without the axes that it does not need to have."""
    optional = {axis.name for axis in MESH_AXES if axis.is_optional}
    return {name: size for name, size in mesh.items() if size > 1 or name not in optional}
