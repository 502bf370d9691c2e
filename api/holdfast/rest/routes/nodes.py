"""`/nodes`: list, show, cordon, uncordon."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from holdfast.rest.http.problems import documented
from holdfast.rest.services import ServicesDep
from holdfast.schemas import Cordon
from holdfast_service.job_model.storable_text import StorableText
from holdfast_service.views.nodes import NodeView
from holdfast_service.views.pages import NodePage

router = APIRouter(prefix="/api/v1/nodes", tags=["nodes"])

NodeId = Annotated[StorableText, Path(description="name of the node, or its start", max_length=255)]


@router.get("", summary="The nodes of the cluster, with cordoned and quarantined nodes")
async def list_nodes(services: ServicesDep) -> NodePage:
    return await services.nodes.list()


@router.get(
    "/{node_id}",
    summary="A node: its health, its incidents and its jobs",
    responses=documented(404, 422),
)
async def get_node(services: ServicesDep, node_id: NodeId) -> NodeView:
    return await services.nodes.get(node_id)


@router.post(
    "/{node_id}/cordon",
    summary="Place no new ranks on a node; its ranks move to a standby",
    responses=documented(400, 404, 422),
)
async def cordon_node(services: ServicesDep, node_id: NodeId, request: Cordon) -> NodeView:
    return await services.nodes.cordon(node_id, request.reason, request.until)


@router.post(
    "/{node_id}/uncordon",
    summary="End a cordon or a quarantine of a node; idempotent",
    responses=documented(404, 422),
)
async def uncordon_node(services: ServicesDep, node_id: NodeId) -> NodeView:
    return await services.nodes.uncordon(node_id)
