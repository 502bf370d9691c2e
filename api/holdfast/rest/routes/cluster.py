"""`/cluster`: the nodes, the queue and the capacity; the check of all nodes."""

from __future__ import annotations

from fastapi import APIRouter

from holdfast.rest.http.problems import documented
from holdfast.rest.services import ServicesDep
from holdfast_service.views.cluster_check import ClusterCheckView
from holdfast_service.views.lists import ClusterView

router = APIRouter(prefix="/api/v1/cluster", tags=["nodes"])


@router.get("", summary="Nodes, queue and capacity, a few seconds old at most")
async def get_cluster(services: ServicesDep) -> ClusterView:
    return await services.overview.cluster()


@router.post(
    "/check",
    summary="Inspect every node: what is wrong where, and what to do; takes some seconds",
    responses=documented(503),
)
async def check_cluster(services: ServicesDep) -> ClusterCheckView:
    return await services.cluster_check.check()
