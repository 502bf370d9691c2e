"""The response models of nodes and of what was found about them."""

from __future__ import annotations

from pydantic import Field

from holdfast_service.job_model.times import Time
from holdfast_service.policy.quarantine import NodeStanding
from holdfast_service.views.view import View
from holdfast_workers.protocol.findings import Level


class NodeFindingView(View):
    """A finding of a health probe about a node."""

    probe: str = Field(
        description="accelerator, host, network, preflight, exchange; or room: the node is too "
        "small for the job that reported it"
    )
    kind: str
    level: Level
    what: str
    where: str = Field(description="device, folder or interface")
    code: int | None = Field(description="XID number")
    lost: bool = Field(description="the device or node cannot run anything")
    needed: int = Field(default=0, description="room: what the job needs, in bytes or as a number")
    there: int = Field(default=0, description="room: what the node has of it")
    at: Time | None = Field(default=None, description="when it was reported; null: not known")


class UnwellNodeView(View):
    """A node of a job with health findings."""

    node: str = Field(description="its name, as in `/nodes`")
    ranks: tuple[int, ...] = Field(description="ranks of the job on the node; empty: a standby")
    findings: tuple[NodeFindingView, ...]


class NodeTroubleView(View):
    """An incident attributed to a node."""

    job: str
    incident: int
    cause: str
    at: Time


class NodeView(View):
    id: str = Field(description="the machine's address; on the embedded cluster, Ray's id")
    host: str
    state: NodeStanding
    reason: str | None = Field(description="why the node is not used; null: it is")
    since: Time | None
    until: Time | None = Field(description="when it ends by itself; null: when a user lifts it")
    quarantines: int = Field(
        description="consecutive quarantines; each is twice as long as the previous"
    )
    there: bool = Field(description="the node is in the cluster now")
    cpus: float
    gpus: float
    head: bool = Field(default=False, description="the head of the cluster runs on the node")
    first_seen: Time
    last_seen: Time
    jobs: tuple[str, ...] = Field(description="jobs with ranks on the node now")
    standby_of: tuple[str, ...] = Field(
        default=(), description="jobs that keep the node to replace another one"
    )
    findings: tuple[NodeFindingView, ...] = Field(
        description="reported by the last job on the node"
    )
    memory_gb_per_s: dict[str, float] = Field(
        description="device -> memory copy bandwidth measured by the check before use"
    )
    incidents: tuple[NodeTroubleView, ...] = Field(description="newest first, 50 at most")
