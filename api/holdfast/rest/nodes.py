"""`/nodes`: list, show, cordon, uncordon."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from holdfast.rest.problems import documented
from holdfast.rest.services import NodesDep
from holdfast.schemas import Cordon
from holdfast_service.views.jobs import NodePage, NodeView

router = APIRouter(prefix="/api/v1/nodes", tags=["nodes"])

NodeId = Annotated[
    str, Path(description="name of the node, or the beginning of it", max_length=255)
]


@router.get("", response_model=NodePage, summary="The cluster's nodes, and which are set aside")
async def list_nodes(nodes: NodesDep) -> NodePage:
    return await nodes.list()


@router.get(
    "/{node_id}",
    response_model=NodeView,
    summary="One node: its health, its incidents, the jobs on it",
    responses=documented(404, 422),
)
async def get_node(nodes: NodesDep, node_id: NodeId) -> NodeView:
    return await nodes.get(node_id)


@router.post(
    "/{node_id}/cordon",
    response_model=NodeView,
    summary="Let no new rank be seated there; ranks leave it where a standby is",
    responses=documented(400, 404, 422),
)
async def cordon(nodes: NodesDep, node_id: NodeId, how: Cordon) -> NodeView:
    return await nodes.cordon(node_id, how.reason, how.until)


@router.post(
    "/{node_id}/uncordon",
    response_model=NodeView,
    summary="Take it back, whoever had set it aside; again is the same",
    responses=documented(404, 422),
)
async def uncordon(nodes: NodesDep, node_id: NodeId) -> NodeView:
    return await nodes.uncordon(node_id)
