"""`/cluster`: the nodes, the queue and the capacity."""

from __future__ import annotations

from fastapi import APIRouter

from holdfast.rest.services import OverviewDep
from holdfast_service.views.lists import ClusterView

router = APIRouter(prefix="/api/v1/cluster", tags=["nodes"])


@router.get("", summary="Nodes, queue and capacity, a few seconds old at most")
async def get_cluster(overview: OverviewDep) -> ClusterView:
    return await overview.cluster()
