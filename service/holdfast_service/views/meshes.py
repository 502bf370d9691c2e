"""The response models of a spec's validation: its resolved form, and its meshes with reasons."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from holdfast_service.placement.mesh_choice import MeshOrder
from holdfast_service.views.view import View
from holdfast_workers.byte_sizes import size_of
from holdfast_workers.protocol.node_needs import NodeNeeds

MAX_LISTED = 200
"""Most meshes, and most refusals, of one answer."""


class LegalMeshView(View):
    """A mesh on which the job may train."""

    mesh: dict[str, int] = Field(description="axis → its size, outermost first")
    world_size: int
    nodes: int
    memory_bytes: int | None = Field(
        description="what a rank needs, modelled from the spec; null: not known"
    )
    why: str = Field(description="why it has its place in the order")


class RefusedNodesView(View):
    """A number of nodes on which the job never trains."""

    nodes: int
    mesh: str | None = Field(description="the listed mesh; null: no list was given")
    why: str


class MeshOrderView(View):
    """The meshes of an elastic job, best first."""

    legal: tuple[LegalMeshView, ...]
    refused: tuple[RefusedNodesView, ...]
    more: int = Field(description="meshes and refusals that are not listed")


class NodeNeedsView(View):
    """The least that each node needs, computed from the spec."""

    shm_bytes: int | None = Field(
        description="of /dev/shm, for the ranks' checkpoints in memory and copies of other nodes'; "
        "null: not known"
    )
    ram_bytes: int | None = Field(description="memory, with these; null: not known")
    tasks: int = Field(description="processes and threads")
    what: str = Field(description="all of it as a sentence")


class ValidSpecView(View):
    spec: dict[str, Any] = Field(
        description="the resolved spec: the fields that mean something for its code, defaults "
        "filled in"
    )
    meshes: MeshOrderView | None = Field(description="null: the job has one mesh")
    node_needs: NodeNeedsView


def valid_spec_view(
    spec: dict[str, Any], order: MeshOrder | None, needs: NodeNeeds
) -> ValidSpecView:
    """`order`: of the meshes of an elastic job."""
    return ValidSpecView(
        spec=spec,
        meshes=_order_view(order) if order is not None else None,
        node_needs=NodeNeedsView(
            shm_bytes=needs.shm_bytes or None,
            ram_bytes=needs.ram_bytes or None,
            tasks=needs.tasks,
            what=_described(needs),
        ),
    )


def _described(needs: NodeNeeds) -> str:
    parts = [f"{size_of(needs.shm_bytes)} of /dev/shm"] if needs.shm_bytes else []
    parts += [f"{size_of(needs.ram_bytes)} of memory"] if needs.ram_bytes else []
    listed = f"{', '.join(parts)} and " if parts else ""
    return f"each node needs at least {listed}{needs.tasks} processes and threads"


def _order_view(order: MeshOrder) -> MeshOrderView:
    legal = tuple(
        LegalMeshView(
            mesh=found.shape.mesh,
            world_size=found.shape.world_size,
            nodes=found.shape.nodes,
            memory_bytes=found.memory,
            why=found.why,
        )
        for found in order.legal[:MAX_LISTED]
    )
    refused = tuple(
        RefusedNodesView(nodes=found.nodes, mesh=found.mesh or None, why=found.why)
        for found in order.refused[:MAX_LISTED]
    )
    more = len(order.legal) - len(legal) + len(order.refused) - len(refused)
    return MeshOrderView(legal=legal, refused=refused, more=more)
