"""The response models of the check of a whole cluster."""

from __future__ import annotations

from pydantic import Field

from holdfast_service.diagnosis.grades import Grade
from holdfast_service.views.view import View


class NodeCheckView(View):
    """The result of one check of a node."""

    node: str
    host: str = Field(description="the node's address")
    what: str = Field(description="what was checked: python, clock, shm, network, gpu, ...")
    grade: Grade
    seen: str
    advice: str = Field(description="what to do; empty if nothing is wrong")


class ClusterCheckView(View):
    """The results of all checks, node by node; a node without a bad result has a good one."""

    findings: tuple[NodeCheckView, ...]
    nodes: int = Field(description="nodes of the cluster")
    took_s: float
