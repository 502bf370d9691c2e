"""Decides which queued job may start, from the cluster's capacity and other jobs' demand. Pure.

Jobs are served in one pass over the queue, in the order of their priority, then of submission. A
job that does not fit lets later ones pass, for a while: then it is overdue, and nodes are reserved
for it if the cluster is large enough, so that it starts once the jobs on them have ended. Jobs
after it take none of these; any other node is free for the next job that fits. Where jobs that have
just started will be placed is an estimate.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import ceil, log2, prod
from typing import Any

from holdfast_service.job_model.free_nodes import CPU, GPU, FreeNodes
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.node_labels import (
    LabelRule,
    amount_text,
    rules_of,
    why_too_little,
    why_unlabelled,
)
from holdfast_service.job_model.resources_spec import node_amounts
from holdfast_service.job_model.supervisor_protocol import Capacity, NodeCapacity
from holdfast_service.placement.mesh_axes import MESH_AXES
from holdfast_service.policy.quarantine import Avoided, NodeStanding, cordoned_only
from holdfast_service.wording import plural

MAX_NODES_LISTED = 4
LEAST_WAIT_S = 60.0
"""More nodes are reserved for a job after twice this time at the earliest."""
KEEP_PLACE = frozenset({"nodes", "cluster"})
"""What a queued job waits for that goes before those after it: it was tried and lacks nodes, or the
last look at the cluster has failed. A job that cannot be driven at all must not block the queue."""


_DUE = Avoided(NodeStanding.CORDONED, "for an overdue job before it")
_NO_CAPACITY = Capacity((), can_grow=False)


@dataclass(frozen=True)
class NodeDemand:
    """The resources of a job: one bundle on each of `nodes` different nodes."""

    nodes: int
    cpus: float
    gpus: float
    least: int = 0
    """Nodes with which an elastic job can start; 0: it needs all."""
    standbys: int = 0
    """Number of `nodes` that train nothing."""
    custom: tuple[tuple[str, float], ...] = ()
    """(resource, amount) of each bundle beside CPUs and GPUs."""
    labels: tuple[LabelRule, ...] = ()
    """Rules for the labels of each node."""

    @property
    def amounts(self) -> dict[str, float]:
        """All resources of a bundle."""
        return {CPU: self.cpus, GPU: self.gpus, **dict(self.custom)}

    @property
    def bundle(self) -> tuple[Hashable, ...]:
        """Alike for all demands that the same nodes have room for."""
        return self.cpus, self.gpus, self.custom, self.labels

    @property
    def to_start(self) -> int:
        return self.least or self.nodes

    @property
    def bundle_text(self) -> str:
        """E.g. `1 CPU, 0 GPUs and 2 fpga, labelled disk=nvme`."""
        named = [plural(self.cpus, "CPU"), plural(self.gpus, "GPU")]
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
        """The demand of a stored spec, which is not validated as a whole, because thousands are
        read at once. None if it cannot be read: that must affect only the job itself."""
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
    """The demand of a job that has started or is in the queue."""

    job: str
    demand: NodeDemand
    name: str = ""
    overdue: int = 0
    """Nodes are reserved for it: 1, and 1 more each time that it has waited twice as long; 0: it
    has not waited long."""
    unusable: Mapping[str, Avoided] = field(default_factory=dict)
    """The nodes that this job cannot use while others can, by name or id."""


def times_overdue(waited_s: float, reserve_after_s: float) -> int:
    """`Claim.overdue` of a job that has waited so long."""
    if waited_s <= reserve_after_s:
        return 0
    return 1 + max(0, int(log2(waited_s / max(reserve_after_s, LEAST_WAIT_S))))


@dataclass(frozen=True)
class Reservation:
    """Nodes that are kept for a job in the queue."""

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
    """Ids of the nodes that it must not start on: they are for overdue jobs before it."""
    given_nodes: tuple[str, ...] = ()
    """Ids of those that it leaves, if others have room, to jobs that start before it."""
    reservation: Reservation | None = None
    """The nodes that are kept while it waits."""


def admit(
    capacity: Capacity,
    aside: Mapping[str, Avoided],
    held: Collection[Claim],
    before: Iterable[Claim],
    asking: Claim,
) -> Admission:
    """Admit the asking job if it fits.

    `aside`: the nodes that are set aside, by name; those in quarantine are used only where the
    others are too few, and cordoned ones never. `held`: claims of started jobs. `before`: of the
    jobs before it in the queue, in their order, which go first where they fit.
    """
    if capacity.unlimited:
        return Admission(True)
    queue = QueuePass(capacity, aside, held)
    for claim in before:
        queue.serve(claim)
    if queue.has_estimates:  # an overdue job may need more of its nodes than it seems
        unusable = {**asking.unusable, **dict.fromkeys(queue.due, _DUE)}
        asking = replace(asking, unusable=unusable)
    off, given, fitting = {*queue.reserved, *queue.due}, set(queue.given), queue.fitting(asking)
    nodes = queue.serve(asking)
    if not nodes:
        reservation = queue.reservation_for(asking)
        return Admission(False, queue.why(asking, fitting), reservation=reservation)
    left = tuple(sorted(off.difference(nodes))), tuple(sorted(given.difference(nodes)))
    well = [node for node in fitting if not queue.is_quarantined(node)]
    if len(well) >= len(nodes):
        return Admission(True, "", *left)
    why = queue.why(asking, well, without_quarantined=True)
    return Admission(True, f"nodes in quarantine are used, because {why}", *left)


class LackedNodes:
    """The nodes that jobs wait for although the cluster has enough of them: what elastic jobs must
    not take meanwhile."""

    def __init__(
        self,
        capacity: Capacity = _NO_CAPACITY,
        aside: Mapping[str, Avoided] | None = None,
        claims: Iterable[Claim] = (),
    ) -> None:
        """`claims`: of jobs that may have too few nodes to train."""
        self._placed = capacity.placed
        self._queue = QueuePass(capacity, aside or {}, ())
        self._jobs: dict[frozenset[str], set[str]] = {}
        """The jobs that could use each set of nodes; two of them are enough."""
        for claim in claims:
            needed, could_use = claim.demand.to_start, self._queue.large_enough(claim)
            if len(self._placed.get(claim.job, ())) < needed <= len(could_use):
                jobs = self._jobs.setdefault(could_use, set())
                if len(jobs) < _ENOUGH:
                    jobs.add(claim.job)

    def beside(self, job: str) -> frozenset[str]:
        """The ids of the nodes that other jobs than this one wait for."""
        return frozenset[str]().union(
            *(nodes for nodes, jobs in self._jobs.items() if jobs - {job})
        )

    def leaves_none(self, job: str, demand: NodeDemand) -> bool:
        """Whether others wait for each further node, free or not, that is large enough for it."""
        others = self.beside(job)
        own = self._placed.get(job, ())
        return bool(others) and self._queue.large_enough(Claim(job, demand)) <= others.union(own)


_ENOUGH = 2
"""Jobs that wait for the same nodes: each other job is then one that they hold back."""

_Kind = tuple[tuple[Hashable, ...], frozenset[str]]
"""Identifies claims that the same nodes have room for: their bundle, and the nodes they cannot
use."""


class QueuePass:
    """The free resources of the nodes, while the jobs of the queue are served in their order.

    What was found for a claim holds for those of its kind: the work grows with the nodes that are
    given and the kinds of claims, not with the nodes times the jobs."""

    def __init__(
        self, capacity: Capacity, aside: Mapping[str, Avoided], held: Iterable[Claim]
    ) -> None:
        """`aside`, `held`: see `admit`."""
        self._nodes = {node.node_id: node for node in capacity.nodes}
        self._aside, self._cordoned = aside, cordoned_only(aside)
        self._free = FreeNodes(capacity, aside)
        self._large_enough: dict[_Kind, frozenset[str]] = {}
        self._most_fitting: dict[_Kind, int] = {}
        """For each kind of which a claim did not fit, the number of nodes with room for it, which
        only falls."""
        self._used_up: set[_Kind] = set()
        """The kinds of which all nodes are reserved."""
        self.reserved: dict[str, str] = {}
        """The nodes that are kept for jobs that do not fit, and for which job."""
        self.due: set[str] = set()
        """The nodes of the overdue jobs that fit."""
        self.given: set[str] = set()
        """The nodes of the other jobs that fit."""
        self.reservations: dict[str, Reservation] = {}
        """Reservations by job, in the order of the queue."""
        self.has_estimates = False
        """Whether started jobs have no place yet."""
        self.lacking = self._place(held, capacity.placed)
        """The demand of each started job without enough nodes, and the number of nodes that it
        lacks."""

    def serve(self, claim: Claim) -> list[str]:
        """Give the job its nodes; []: it does not fit, and nodes may be reserved for it."""
        needed, kind = claim.demand.to_start, _kind_of(claim)
        if self._most_fitting.get(kind, needed) >= needed:
            nodes = list(islice(self._fitting(claim), needed))
            if len(nodes) == needed:
                self.take(nodes, claim.demand)
                (self.due if claim.overdue else self.given).update(nodes)
                return nodes
            self._most_fitting[kind] = len(nodes)
        if claim.overdue and kind not in self._used_up:
            self._reserve(claim, kind)
        return []

    def fitting(self, claim: Claim) -> list[str]:
        """The nodes that have room for a bundle of the job, the best first."""
        amounts, labels = claim.demand.amounts, claim.demand.labels
        own = (node for node, job in self.reserved.items() if job == claim.job)
        kept = [node for node in own if self._free.has_room(node, amounts, labels)]
        return [*kept, *self._fitting(claim)]

    def reservation_for(self, claim: Claim) -> Reservation | None:
        """The nodes that are kept for the job, or else for the first one before it."""
        return self.reservations.get(claim.job) or next(iter(self.reservations.values()), None)

    def large_enough(self, claim: Claim) -> frozenset[str]:
        """The nodes that would have room for a bundle of the job if no job were there."""
        kind, demand = _kind_of(claim), claim.demand
        if (known := self._large_enough.get(kind)) is not None:
            return known
        nodes = self._free.large_enough(demand.amounts, demand.labels)
        found = frozenset(node for node in nodes if not self._is_in(claim.unusable, node))
        self._large_enough[kind] = found
        return found

    def take(self, nodes: Iterable[str], demand: NodeDemand) -> None:
        amounts = demand.amounts
        for node in nodes:
            self._free.take(node, amounts)

    def is_quarantined(self, node: str) -> bool:
        return self._free.is_quarantined(node)

    def why(
        self, claim: Claim, fitting: Sequence[str], *, without_quarantined: bool = False
    ) -> str:
        """Why the nodes that fit are too few."""
        demand = claim.demand
        aside = {**(self._aside if without_quarantined else self._cordoned), **claim.unusable}
        nodes = [node for node_id, node in self._nodes.items() if not self._is_in(aside, node_id)]
        reason = _why_impossible(nodes, demand) or (
            f"{plural(demand.to_start, 'node')} with {demand.bundle_text} free "
            f"{'is' if demand.to_start == 1 else 'are'} needed, {len(fitting)} of "
            f"{plural(len(nodes), 'node')} {'has' if len(nodes) == 1 else 'have'} them"
        )
        if (kept := self.reservation_for(claim)) is not None:
            it = "it" if kept.job == claim.job else kept.name
            reason += f"; {kept.nodes} are reserved for {it}"
            if it != "it" and (more := len(self.reserved) - kept.nodes):
                reason += f", and {more} for others before it"
        return reason + _set_aside_note(
            f"{name} ({aside[name].reason})"
            for name in sorted(aside.keys() & set(self._free.names.values()))
        )

    def _reserve(self, claim: Claim, kind: _Kind) -> None:
        """Keep nodes for the job until as many as it needs have room for it: of those that are
        large enough and not kept for a job before it, all that have room now, then those with most
        free. None if too few are large enough, which no waiting changes.

        Later jobs get none of them, so the room on the freest node only grows until it is enough,
        and then on the next: the job starts after the jobs on these nodes have ended. Some may
        never end. So each time that it has waited twice as long, as many more are kept of the nodes
        without room: in the end, its start waits for none of those jobs.
        """
        needed, large_enough = claim.demand.to_start, self.large_enough(claim)
        if len(large_enough) < needed:
            return
        ready = list(self._fitting(claim)) if self._most_fitting[kind] else []
        self._keep(ready, claim)
        most = (needed - len(ready)) * claim.overdue
        others = list(islice(filter(large_enough.__contains__, self._free.best_first()), most))
        self._keep(others, claim)
        self._most_fitting[kind] = 0
        if len(others) < most:
            self._used_up.add(kind)
        if nodes := [*ready, *others]:
            self.reservations[claim.job] = Reservation(
                claim.job, claim.name or claim.job, len(nodes)
            )

    def _keep(self, nodes: Iterable[str], claim: Claim) -> None:
        for node in nodes:
            self._free.keep(node)
            self.reserved[node] = claim.job

    def _place(
        self, held: Iterable[Claim], placed: Mapping[str, Sequence[str]]
    ) -> list[tuple[NodeDemand, int]]:
        """Take the nodes of started jobs; returns what `lacking` says.

        Jobs that have started but are not placed yet take the best nodes, as their placement does.
        An elastic job that is placed asks for no further nodes that another job waits for."""
        unplaced: list[tuple[Claim, int, set[str]]] = []
        for claim in held:
            own = placed.get(claim.job, ())
            self.take([node for node in own if node in self._free], claim.demand)
            missing = (claim.demand.to_start if own else claim.demand.nodes) - len(own)
            if missing > 0:
                unplaced.append((claim, missing, set(own)))
        lacking, self.has_estimates = [], bool(unplaced)
        for claim, missing, had in unplaced:
            others = list(islice((n for n in self._fitting(claim) if n not in had), missing))
            self.take(others, claim.demand)
            if (lack := claim.demand.to_start - len(had) - len(others)) > 0:
                lacking.append((claim.demand, lack))
        return lacking

    def _fitting(self, claim: Claim) -> Iterator[str]:
        for node in self._free.with_room(claim.demand.amounts, claim.demand.labels):
            if not self._is_in(claim.unusable, node):
                yield node

    def _is_in(self, aside: Mapping[str, Avoided], node: str) -> bool:
        return node in aside or self._free.names[node] in aside


def _kind_of(claim: Claim) -> _Kind:
    return claim.demand.bundle, frozenset(claim.unusable)


def _why_impossible(nodes: Iterable[NodeCapacity], wanted: NodeDemand) -> str:
    """Why the job cannot start on these nodes even if all were free, by what it asks for beside
    CPUs and GPUs; "" if it can."""
    nodes = [node for node in nodes if node.cpus or node.gpus]  # not the head
    why = why_unlabelled(wanted.labels, [node.labels for node in nodes], wanted.to_start)
    labelled = [n.custom for n in nodes if all(rule.allows(n.labels) for rule in wanted.labels)]
    why = why or why_too_little(dict(wanted.custom), labelled, wanted.to_start)
    are_needed = "is needed" if wanted.to_start == 1 else "are needed"
    return f"{plural(wanted.to_start, 'node')} {are_needed}: {why}" if why else ""


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


def _set_aside_note(found: Iterable[str]) -> str:
    """`; 1 more are set aside: node1 (cordoned: new cables)`."""
    aside = list(found)
    if not aside:
        return ""
    rest = [f"{len(aside) - MAX_NODES_LISTED} others"] if len(aside) > MAX_NODES_LISTED else []
    return f"; {len(aside)} more are set aside: {', '.join([*aside[:MAX_NODES_LISTED], *rest])}"
