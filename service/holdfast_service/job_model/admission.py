"""Decides which queued job may start, from the cluster's capacity and other jobs' demand. Pure.

Jobs start in the order of submission; a job that does not fit does not block later jobs. The
count is an estimate on purpose (only the cluster knows where bundles are placed): it avoids
starting a job that would only wait, and gives the reason why a queued job waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.supervisor_protocol import Capacity
from holdfast_service.policy.quarantine import Avoided, cordoned_only, node_name

MAX_NODES_LISTED = 4
_SLACK = 1e-9  # sums of 0.1 CPUs


@dataclass(frozen=True)
class NodeDemand:
    """The resources of a job: one bundle of CPUs and GPUs on each of `nodes` different nodes."""

    nodes: int
    cpus: float
    gpus: float
    least: int = 0
    """Nodes with which an elastic job can start; 0: it needs all."""

    @property
    def to_start(self) -> int:
        return self.least or self.nodes

    @classmethod
    def from_spec(cls, spec: JobSpec) -> NodeDemand:
        return cls(
            nodes=spec.nodes,
            cpus=spec.node_cpus,
            gpus=spec.node_gpus,
            least=spec.needed_nodes if spec.resources.nodes is not None else 0,
        )

    @classmethod
    def from_stored_spec(cls, spec: Mapping[str, Any]) -> NodeDemand | None:
        """From a stored spec, without validating all of it, as thousands are read at once. None if
        it cannot be read: that must affect only the job itself."""
        try:
            resources = spec["resources"]
            per_node = int(resources["workers_per_node"])
            return cls(
                nodes=ceil(_world_size(spec) / per_node) + int(resources["standby_nodes"]),
                cpus=per_node * float(resources["cpus_per_worker"]),
                gpus=per_node * float(resources["gpus_per_worker"]),
                least=int((resources.get("nodes") or {"min": 0})["min"]),
            )
        except _READ_ERRORS:
            return None


def stored_world_size(spec: Mapping[str, Any]) -> int:
    """The world size in a stored spec; 0 if it cannot be read."""
    try:
        return _world_size(spec)
    except _READ_ERRORS:
        return 0


@dataclass(frozen=True)
class Admission:
    """Whether a job may start, and the reason to report."""

    may_start: bool
    why: str = ""
    """Why it may not start; or why it starts on nodes that are in quarantine."""


def admit(
    capacity: Capacity,
    aside: Mapping[str, Avoided],
    held: Collection[NodeDemand],
    before: Collection[NodeDemand],
    wanted: NodeDemand,
) -> Admission:
    """Admit the job if it fits. Nodes in quarantine are used only where the others are too few;
    cordoned nodes are never used.

    `aside`: all nodes that are set aside. See `reason_to_wait` for the other parameters.
    """
    shortage = reason_to_wait(usable(capacity, aside), held, before, wanted)
    if shortage is None:
        return Admission(True)
    reason = reason_to_wait(usable(capacity, cordoned_only(aside)), held, before, wanted)
    if reason is not None:
        return Admission(False, reason)
    return Admission(True, f"nodes in quarantine are used, because {shortage}")


def reason_to_wait(
    capacity: Capacity, held: Iterable[NodeDemand], before: Iterable[NodeDemand], wanted: NodeDemand
) -> str | None:
    """Why a job with the demand `wanted` cannot start now; None: it can.

    `held`: the demand of started jobs. `before`: the demand of older queued jobs, which go first
    where they fit.
    """
    if capacity.can_grow:
        return None  # the cluster's own scheduler waits, and adds nodes meanwhile
    free = {node.node_id: [node.cpus, node.gpus] for node in capacity.nodes}
    for demand in held:
        _take(free, demand, partly=True)
    for demand in before:
        _take(free, demand, partly=False)
    fitting = len(_fitting(free, wanted))
    if fitting >= wanted.to_start:
        return None
    return (
        f"{wanted.to_start} nodes with {wanted.cpus:g} CPUs and {wanted.gpus:g} GPUs free are "
        f"needed, {fitting} of {len(capacity.nodes)} nodes have them" + _set_aside_note(capacity)
    )


def usable(capacity: Capacity, aside: Mapping[str, Avoided]) -> Capacity:
    """The capacity without the nodes in `aside`."""
    names = [node_name(node.node_id, node.host) for node in capacity.nodes]
    pairs = zip(names, capacity.nodes, strict=True)
    left = tuple(node for name, node in pairs if name not in aside)
    removed = (f"{name} ({aside[name].reason})" for name in sorted(aside.keys() & set(names)))
    return replace(capacity, nodes=left, set_aside=tuple(removed))


_READ_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def _world_size(spec: Mapping[str, Any]) -> int:
    return prod(int(size) for size in spec["parallel"].values() if isinstance(size, int))


def _set_aside_note(capacity: Capacity) -> str:
    """`; 1 more are set aside: node1 (cordoned: new cables)`."""
    aside = capacity.set_aside
    if not aside:
        return ""
    rest = [f"{len(aside) - MAX_NODES_LISTED} others"] if len(aside) > MAX_NODES_LISTED else []
    return f"; {len(aside)} more are set aside: {', '.join([*aside[:MAX_NODES_LISTED], *rest])}"


def _take(free: dict[str, list[float]], demand: NodeDemand, *, partly: bool) -> None:
    """Subtract the demand from the nodes with most free, as a spread placement does. `partly`: also
    if only some of its nodes fit."""
    nodes = _fitting(free, demand)
    if len(nodes) < demand.to_start and not partly:
        return
    for node in nodes[: demand.nodes if partly else demand.to_start]:
        free[node][0] -= demand.cpus
        free[node][1] -= demand.gpus


def _fitting(free: dict[str, list[float]], demand: NodeDemand) -> list[str]:
    fitting = [
        node
        for node, (cpus, gpus) in free.items()
        if cpus + _SLACK >= demand.cpus and gpus + _SLACK >= demand.gpus
    ]
    return sorted(fitting, key=lambda node: (*(-amount for amount in free[node]), node))
