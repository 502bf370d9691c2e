"""Decides which nodes an autoscaled cluster is asked to add, within the operator's bounds. Pure.

A queued job that lacks nodes is asked for as a group of all the nodes that it starts with: those
that it could have now, and new ones. The group is kept off all other nodes, so that it only has its
place once the job may start. Jobs are asked for in the order of the queue. Elastic jobs, which ask
for one more node themselves while they train, are held back where the bounds leave none for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast_service.job_model.admission import Claim, NodeDemand, QueuePass
from holdfast_service.job_model.node_labels import has_amounts, selector_of
from holdfast_service.job_model.supervisor_protocol import Capacity, GrowthRequest, NodeCapacity
from holdfast_service.policy.quarantine import Avoided
from holdfast_service.wording import plural

SETTING = "HOLDFAST_AUTOSCALE_"
"""Begins the name of a bound's setting, which ends with its resource."""


@dataclass(frozen=True)
class ClusterSize:
    """Nodes that run ranks, with all their CPUs and GPUs."""

    nodes: int = 0
    cpus: float = 0.0
    gpus: float = 0.0

    def plus(self, nodes: int, demand: NodeDemand) -> ClusterSize:
        """The size with `nodes` more nodes, each as large as a bundle of `demand`."""
        cpus, gpus = nodes * demand.cpus, nodes * demand.gpus
        return ClusterSize(self.nodes + nodes, self.cpus + cpus, self.gpus + gpus)


@dataclass(frozen=True)
class GrowthBounds:
    """The largest size that the cluster is asked to have; None: no bound."""

    nodes: int | None = None
    cpus: float | None = None
    gpus: float | None = None

    @property
    def by_resource(self) -> dict[str, float]:
        every = {"nodes": self.nodes, "cpus": self.cpus, "gpus": self.gpus}
        return {resource: bound for resource, bound in every.items() if bound is not None}

    def why_not(self, before: ClusterSize, after: ClusterSize) -> str:
        """Why a cluster must not grow from one size to the other; "" if it may."""
        found = []
        for resource, bound in self.by_resource.items():
            wanted = getattr(after, resource)
            if wanted > max(bound, getattr(before, resource)):
                name = "nodes" if resource == "nodes" else f"{resource[:-1].upper()}s"
                found.append(
                    f"it would have {wanted:g} {name}, and {SETTING}{resource.upper()} allows "
                    f"{bound:g}"
                )
        return "; ".join(found)


@dataclass(frozen=True)
class GrowthPlan:
    """The nodes that the cluster is asked for."""

    requests: Mapping[str, GrowthRequest] = field(default_factory=dict)
    """Requests by job."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """The jobs that lack nodes which the bounds do not allow, and why."""
    may_start: frozenset[str] = frozenset()
    """The jobs of the queue for which enough nodes are there."""
    held_back: frozenset[str] = frozenset()
    """Elastic jobs that must not ask for a further node."""
    size: ClusterSize = ClusterSize()
    """Size of the cluster once it has all that is asked for."""
    bounds: GrowthBounds | None = None
    """The operator's bounds; None if nothing was planned yet, as for a cluster that cannot grow."""

    def note(self, job: str) -> str:
        """The end of the reason why this job waits."""
        request = self.requests.get(job)
        if request is not None:
            return f"; the cluster grows: it was asked for {request.what}"
        why = self.refused.get(job)
        return f"; the cluster does not grow for it: {why}" if why else ""


def plan_growth(
    capacity: Capacity,
    aside: Mapping[str, Avoided],
    held: Collection[Claim],
    queue: Sequence[Claim],
    growing: Iterable[Claim],
    bounds: GrowthBounds,
) -> GrowthPlan:
    """The nodes to ask for now, in place of all that was asked for before.

    `aside`: the nodes that are set aside, by name. `held`: claims of started jobs. `queue`: claims
    of queued jobs, in their order. `growing`: claims of the elastic jobs that train, with as many
    nodes as each may have.
    """
    left = QueuePass(capacity, aside, held)
    lacking = [claim for claim in queue if not left.serve(claim)]
    size = _size(capacity)
    for demand, missing in left.lacking:  # Ray's placement of these jobs asks for them
        size = size.plus(missing, demand)
    requests: dict[str, GrowthRequest] = {}
    refused: dict[str, str] = {}
    for claim in lacking:
        demand, fitting = claim.demand, left.fitting(claim)
        new = demand.to_start - len(fitting)
        if why := bounds.why_not(size, size.plus(new, demand)):
            refused[claim.job] = why
            continue
        size = size.plus(new, demand)
        off = _large_enough(capacity.nodes, demand) - set(fitting)
        requests[claim.job] = _request(claim.job, demand, new, off)
        left.take(fitting, demand)
    held_back = set()
    for job in growing:
        placed = capacity.placed.get(job.job, ())
        if not placed or len(placed) >= job.demand.nodes:
            continue
        free = [node for node in left.fitting(job) if node not in placed]
        if free:
            left.take(free[:1], job.demand)
        elif requests or bounds.why_not(size, size.plus(1, job.demand)):
            held_back.add(job.job)
        else:
            size = size.plus(1, job.demand)
    may_start = frozenset(claim.job for claim in queue) - {claim.job for claim in lacking}
    return GrowthPlan(requests, refused, may_start, frozenset(held_back), size, bounds)


def _request(job: str, demand: NodeDemand, new: int, off: Iterable[str]) -> GrowthRequest:
    return GrowthRequest(
        job,
        f"{plural(new, 'more node')} with {demand.bundle_text}".removesuffix(","),
        nodes=demand.to_start,
        new=new,
        bundle={resource: amount for resource, amount in demand.amounts.items() if amount},
        labels=selector_of(demand.labels),
        off=tuple(sorted(off)),
    )


def _size(capacity: Capacity) -> ClusterSize:
    nodes = [node for node in capacity.nodes if node.cpus or node.gpus]
    return ClusterSize(len(nodes), sum(n.cpus for n in nodes), sum(n.gpus for n in nodes))


def _large_enough(nodes: Iterable[NodeCapacity], demand: NodeDemand) -> set[str]:
    """The nodes on which Ray would place a bundle if they were free."""
    amounts = demand.amounts
    return {
        node.node_id
        for node in nodes
        if has_amounts({"CPU": node.cpus, "GPU": node.gpus, **node.custom}, amounts)
        and all(rule.allows(node.labels) for rule in demand.labels)
    }
