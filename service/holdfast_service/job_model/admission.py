"""Decides which queued job may start, from the cluster's capacity and other jobs' demand. Pure.

Jobs start in the order of their priority, then of submission. A job that does not fit lets later
ones pass, for a while: then it is overdue, and nodes are reserved for the first overdue job in the
queue, so that it starts once the jobs on them have ended. Where jobs that have just started will be
placed is an estimate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, prod
from typing import Any

from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.node_labels import (
    LabelRule,
    amount_text,
    has_amounts,
    rules_of,
    why_too_little,
    why_unlabelled,
)
from holdfast_service.job_model.resources_spec import node_amounts
from holdfast_service.job_model.supervisor_protocol import Capacity, NodeCapacity
from holdfast_service.placement.mesh_axes import MESH_AXES
from holdfast_service.policy.quarantine import Avoided, cordoned_only, node_name

MAX_NODES_LISTED = 4
CPU, GPU = "CPU", "GPU"


@dataclass
class FreeNode:
    """What no job and no other program uses on a node, by resource, and the node's labels."""

    amounts: dict[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


Resources = dict[str, FreeNode]  # by node id


@dataclass(frozen=True)
class NodeDemand:
    """The resources of a job: one bundle on each of `nodes` different nodes."""

    nodes: int
    cpus: float
    gpus: float
    least: int = 0
    """Nodes with which an elastic job can start; 0: it needs all."""
    standbys: int = 0
    """Of `nodes`, those that train nothing."""
    custom: tuple[tuple[str, float], ...] = ()
    """(resource, amount) of each bundle beside CPUs and GPUs."""
    labels: tuple[LabelRule, ...] = ()
    """What the labels of each node must be."""

    @property
    def amounts(self) -> dict[str, float]:
        """All resources of a bundle."""
        return {CPU: self.cpus, GPU: self.gpus, **dict(self.custom)}

    @property
    def to_start(self) -> int:
        return self.least or self.nodes

    @property
    def bundle_text(self) -> str:
        """E.g. `1 CPUs, 0 GPUs and 2 fpga, labelled disk=nvme`."""
        named = [f"{self.cpus:g} CPUs", f"{self.gpus:g} GPUs"]
        named += [amount_text(name, amount) for name, amount in self.custom]
        text = f"{', '.join(named[:-1])} and {named[-1]}"
        return f"{text}, labelled {', '.join(map(str, self.labels))}," if self.labels else text

    @classmethod
    def from_spec(cls, spec: JobSpec) -> NodeDemand:
        return cls(
            nodes=spec.nodes,
            cpus=spec.node_cpus,
            gpus=spec.node_gpus,
            least=spec.needed_nodes if spec.resources.nodes is not None else 0,
            standbys=spec.resources.standby_nodes,
            custom=tuple(spec.resources.node_custom.items()),
            labels=spec.resources.label_rules,
        )

    @classmethod
    def from_stored_spec(cls, spec: Mapping[str, Any]) -> NodeDemand | None:
        """From a stored spec, without validating all of it, as thousands are read at once. None if
        it cannot be read: that must affect only the job itself."""
        try:
            resources = spec["resources"]
            per_node, standbys = int(resources["workers_per_node"]), int(resources["standby_nodes"])
            return cls(
                nodes=ceil(_world_size(spec) / per_node) + standbys,
                cpus=per_node * float(resources["cpus_per_worker"]),
                gpus=per_node * float(resources["gpus_per_worker"]),
                least=_least_nodes(resources.get("nodes"), per_node),
                standbys=standbys,
                custom=tuple(_stored_custom(resources, per_node).items()),
                labels=rules_of(resources.get("node_labels") or {}),
            )
        except _READ_ERRORS:
            return None


def stored_world_size(spec: Mapping[str, Any]) -> int:
    """The world size in a stored spec; 0 if it cannot be read."""
    try:
        return _world_size(spec)
    except _READ_ERRORS:
        return 0


def ranks_per_node(spec: Mapping[str, Any]) -> int:
    """The ranks that share a node in a stored spec; 1 if it cannot be read."""
    try:
        return max(1, int(spec["resources"]["workers_per_node"]))
    except _READ_ERRORS:
        return 1


@dataclass(frozen=True)
class Claim:
    """The demand of another job: one that has started, or one before it in the queue."""

    job: str
    demand: NodeDemand
    name: str = ""
    is_overdue: bool = False
    """It has waited so long that nodes are reserved for it."""


@dataclass(frozen=True)
class Reservation:
    """Nodes that are kept for a job in the queue. An empty `job`: for the asking job itself."""

    job: str
    name: str
    nodes: int


@dataclass(frozen=True)
class Admission:
    """Whether a job may start, and the reason to report."""

    may_start: bool
    why: str = ""
    """Why it may not start; or why it starts on nodes that are in quarantine."""
    reserved_nodes: tuple[str, ...] = ()
    """Ids of the nodes that it must not take when it starts: they are kept for a job before it."""
    reservation: Reservation | None = None
    """The nodes that are kept while it waits."""


def admit(
    capacity: Capacity,
    aside: Mapping[str, Avoided],
    held: Collection[Claim],
    before: Collection[Claim],
    wanted: NodeDemand,
    *,
    is_overdue: bool = False,
) -> Admission:
    """Admit the job if it fits. Nodes in quarantine are used only where the others are too few;
    cordoned nodes are never used.

    `aside`: all nodes that are set aside. `is_overdue`: of the asking job, see `Claim`. See
    `reason_to_wait` for the other parameters.
    """

    def admitted_to(nodes: Capacity) -> Admission:
        return _admit(nodes, held, before, wanted, is_overdue=is_overdue)

    first = admitted_to(usable(capacity, aside))
    cordoned = cordoned_only(aside)
    if first.may_start or len(cordoned) == len(aside):
        return first
    second = admitted_to(usable(capacity, cordoned))
    if not second.may_start:
        return second
    return replace(second, why=f"nodes in quarantine are used, because {first.why}")


def reason_to_wait(
    capacity: Capacity, held: Iterable[Claim], before: Iterable[Claim], wanted: NodeDemand
) -> str | None:
    """Why a job with the demand `wanted` cannot start now; None: it can.

    `held`: of started jobs. `before`: of the jobs before it in the queue, in their order, which go
    first where they fit.
    """
    admission = _admit(capacity, held, before, wanted)
    return None if admission.may_start else admission.why


class QueuePass:
    """The free resources of the nodes, while the jobs of the queue are served in their order."""

    def __init__(self, capacity: Capacity, held: Iterable[Claim]) -> None:
        self.capacity = capacity
        self.free, self.lacking = _free_resources(capacity, held)
        """`lacking`: for each started job without enough nodes: its demand, and how many."""
        self.kept: list[str] = []
        """The nodes that are reserved."""
        self.reservation: Reservation | None = None

    def fitting(self, demand: NodeDemand) -> list[str]:
        """The nodes that have room for a bundle, those with most free first."""
        return _fitting(self.free, demand)

    def take(self, nodes: Iterable[str], demand: NodeDemand) -> None:
        """Nodes that are reserved are left alone."""
        _take(self.free, [node for node in nodes if node in self.free], demand)

    def serve(self, claim: Claim) -> bool:
        """Give the job its nodes; False: it does not fit, and nodes may be reserved for it."""
        demand, fitting = claim.demand, self.fitting(claim.demand)
        if len(fitting) >= demand.to_start:
            self.take(fitting[: demand.to_start], demand)
            return True
        if claim.is_overdue and not self.kept:
            self.kept = nodes_to_reserve(self.capacity, self.free, demand)
            if self.kept:
                self.reservation = Reservation(claim.job, claim.name or claim.job, len(self.kept))
            self.free = {node: left for node, left in self.free.items() if node not in self.kept}
        return False


def nodes_to_reserve(
    capacity: Capacity, free: Mapping[str, FreeNode], demand: NodeDemand
) -> list[str]:
    """The nodes that are kept for a job until all of them have room for it: of those that are large
    enough, the ones with most free. Empty if too few are large enough, which no waiting changes.

    Later jobs get none of them, so the room on the freest node only grows until it is enough, and
    then on the next: the job starts after the jobs on these nodes have ended.
    """
    large_enough = set(_fitting(_without_other_programs(capacity), demand))
    if len(large_enough) < demand.to_start:
        return []
    ready = [node for node in _fitting(free, demand) if node in large_enough]
    others = sorted(large_enough - set(ready), key=lambda node: _freest_first(free, node))
    return [*ready, *others][: demand.to_start]


def usable(capacity: Capacity, aside: Mapping[str, Avoided]) -> Capacity:
    """The capacity without the nodes in `aside`."""
    names = [node_name(node.node_id, node.host) for node in capacity.nodes]
    pairs = zip(names, capacity.nodes, strict=True)
    left = tuple(node for name, node in pairs if name not in aside)
    removed = (f"{name} ({aside[name].reason})" for name in sorted(aside.keys() & set(names)))
    return replace(capacity, nodes=left, set_aside=tuple(removed))


def _admit(
    capacity: Capacity,
    held: Iterable[Claim],
    before: Iterable[Claim],
    wanted: NodeDemand,
    *,
    is_overdue: bool = False,
) -> Admission:
    if capacity.unlimited:
        return Admission(True)
    queue = QueuePass(capacity, held)
    for claim in before:
        queue.serve(claim)
    reservation = queue.reservation
    fitting = queue.fitting(wanted)
    if len(fitting) >= wanted.to_start:
        return Admission(True, reserved_nodes=tuple(sorted(queue.kept)))
    if is_overdue and reservation is None:
        own = nodes_to_reserve(capacity, queue.free, wanted)
        reservation = Reservation("", "", len(own)) if own else None
    note = ""
    if reservation is not None:
        note = f"; {reservation.nodes} are reserved for {reservation.name or 'it'}"
    reason = _why_impossible(capacity, wanted) or (
        f"{wanted.to_start} nodes with {wanted.bundle_text} free are needed, {len(fitting)} of "
        f"{len(capacity.nodes)} nodes have them"
    )
    return Admission(False, reason + note + _set_aside_note(capacity), reservation=reservation)


def _why_impossible(capacity: Capacity, wanted: NodeDemand) -> str:
    """Why the job cannot start on these nodes even if all were free, by what it asks for beside
    CPUs and GPUs; "" if it can."""
    nodes = [node for node in capacity.nodes if node.cpus or node.gpus]  # not the head
    why = why_unlabelled(wanted.labels, [node.labels for node in nodes], wanted.to_start)
    labelled = [n.custom for n in nodes if all(rule.allows(n.labels) for rule in wanted.labels)]
    why = why or why_too_little(dict(wanted.custom), labelled, wanted.to_start)
    return f"{wanted.to_start} nodes are needed: {why}" if why else ""


_READ_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def _world_size(spec: Mapping[str, Any]) -> int:
    parallel = spec["parallel"]
    return prod(int(parallel[axis.name]) for axis in MESH_AXES if axis.name in parallel)


def _stored_custom(resources: Mapping[str, Any], per_node: int) -> dict[str, float]:
    return node_amounts(resources.get("custom") or {}, resources.get("accelerator_type"), per_node)


def _least_nodes(nodes: Mapping[str, Any] | None, per_node: int) -> int:
    """Nodes with which an elastic job can start; 0: the job has no range of nodes."""
    if nodes is None:
        return 0
    scheduled = [
        ceil(prod(entry["mesh"].values()) / per_node) for entry in nodes.get("schedule", ())
    ]
    return max(scheduled, default=int(nodes["min"]))


def _set_aside_note(capacity: Capacity) -> str:
    """`; 1 more are set aside: node1 (cordoned: new cables)`."""
    aside = capacity.set_aside
    if not aside:
        return ""
    rest = [f"{len(aside) - MAX_NODES_LISTED} others"] if len(aside) > MAX_NODES_LISTED else []
    return f"; {len(aside)} more are set aside: {', '.join([*aside[:MAX_NODES_LISTED], *rest])}"


def _free_resources(
    capacity: Capacity, held: Iterable[Claim]
) -> tuple[Resources, list[tuple[NodeDemand, int]]]:
    """The free resources of each node, and the demand of started jobs for which too few have room,
    with the number of nodes that they lack to start.

    Jobs that have started but are not placed yet take those of the nodes with most free, as a
    spread placement does. An elastic job that is placed asks for no further nodes while another
    job waits."""
    free = _without_other_programs(capacity)
    unplaced: list[tuple[NodeDemand, int, set[str]]] = []
    for claim in held:
        placed = capacity.placed.get(claim.job, ())
        _take(free, [node for node in placed if node in free], claim.demand)
        missing = (claim.demand.to_start if placed else claim.demand.nodes) - len(placed)
        if missing > 0:
            unplaced.append((claim.demand, missing, set(placed)))
    lacking = []
    for demand, missing, own in unplaced:
        others = [node for node in _fitting(free, demand) if node not in own][:missing]
        _take(free, others, demand)
        if (lack := demand.to_start - len(own) - len(others)) > 0:
            lacking.append((demand, lack))
    return free, lacking


def _without_other_programs(capacity: Capacity) -> Resources:
    """What the jobs may use of each node."""
    return {node.node_id: FreeNode(_left_for_jobs(node), node.labels) for node in capacity.nodes}


def _left_for_jobs(node: NodeCapacity) -> dict[str, float]:
    foreign = node.foreign_custom
    custom = {name: amount - foreign.get(name, 0.0) for name, amount in node.custom.items()}
    return {CPU: node.cpus - node.foreign_cpus, GPU: node.gpus - node.foreign_gpus, **custom}


def _take(free: Resources, nodes: Iterable[str], demand: NodeDemand) -> None:
    for node in nodes:
        left = free[node].amounts
        for name, amount in demand.amounts.items():
            left[name] = left.get(name, 0.0) - amount


def _fitting(free: Mapping[str, FreeNode], demand: NodeDemand) -> list[str]:
    """The nodes that have room for a bundle, those with most free first."""
    amounts = demand.amounts
    fitting = [
        name
        for name, node in free.items()
        if has_amounts(node.amounts, amounts)
        and all(rule.allows(node.labels) for rule in demand.labels)
    ]
    return sorted(fitting, key=lambda node: _freest_first(free, node))


def _freest_first(free: Mapping[str, FreeNode], node: str) -> tuple[float, float, str]:
    return -free[node].amounts[CPU], -free[node].amounts[GPU], node
