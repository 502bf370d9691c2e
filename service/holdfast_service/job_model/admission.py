"""Which queued job may start: a pure decision on capacity and on what others hold.

Jobs start in the order of their submission as far as they fit; one that does not fit lets later
ones pass. The count is an estimate on purpose (where bundles really lie, the cluster knows): it
keeps jobs from being started into a wait, and names what a job in the queue waits for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.supervisor_protocol import Capacity
from holdfast_service.policy.quarantine import Avoided, closed, node_name

TOLD_NODES = 4
_SLACK = 1e-9  # sums of 0.1 CPUs


@dataclass(frozen=True)
class Demand:
    """What a job holds: a bundle on each of so many different nodes."""

    nodes: int
    cpus: float
    gpus: float

    @classmethod
    def of(cls, spec: JobSpec) -> Demand:
        return cls(nodes=spec.nodes, cpus=spec.node_cpus, gpus=spec.node_gpus)

    @classmethod
    def stored(cls, spec: Mapping[str, Any]) -> Demand | None:
        """Of a resolved spec as it is stored, without reading all of it: thousands are asked at
        once. None: it is no such spec, which is that job's trouble and no other's."""
        try:
            resources = spec["resources"]
            per_node = int(resources["workers_per_node"])
            return cls(
                nodes=ceil(_world_size(spec) / per_node) + int(resources["standby_nodes"]),
                cpus=per_node * float(resources["cpus_per_worker"]),
                gpus=per_node * float(resources["gpus_per_worker"]),
            )
        except _UNREADABLE:
            return None


def stored_world_size(spec: Mapping[str, Any]) -> int:
    """Of a resolved spec as it is stored; 0 where it cannot be read."""
    try:
        return _world_size(spec)
    except _UNREADABLE:
        return 0


@dataclass(frozen=True)
class Admission:
    """Whether a job may start, and what is to be said of it."""

    may_start: bool
    why: str = ""
    """Why not; or why it starts although too few nodes are free beside those in quarantine."""


def admit(
    capacity: Capacity,
    aside: Mapping[str, Avoided],
    held: Collection[Demand],
    before: Collection[Demand],
    wanted: Demand,
) -> Admission:
    """Of the nodes set `aside`, those in quarantine are used where the others are too few.

    See `reason_to_wait` for the others.
    """
    shy = reason_to_wait(usable(capacity, aside), held, before, wanted)
    if shy is None:
        return Admission(True)
    reason = reason_to_wait(usable(capacity, closed(aside)), held, before, wanted)
    if reason is not None:
        return Admission(False, reason)
    return Admission(True, f"nodes in quarantine are used, for {shy}")


def reason_to_wait(
    capacity: Capacity, held: Iterable[Demand], before: Iterable[Demand], wanted: Demand
) -> str | None:
    """Why `wanted` cannot start now; None: it can.

    `held` is what started jobs hold, `before` what older jobs in the queue want: they keep their
    turn where they fit.
    """
    if capacity.can_grow:
        return None  # the cluster's own scheduler waits, and makes nodes meanwhile
    free = {node.node_id: [node.cpus, node.gpus] for node in capacity.nodes}
    for demand in held:
        _take(free, demand, partly=True)
    for demand in before:
        _take(free, demand, partly=False)
    able = len(_fitting(free, wanted))
    if able >= wanted.nodes:
        return None
    return (
        f"{wanted.nodes} nodes with {wanted.cpus:g} CPUs and {wanted.gpus:g} GPUs free are needed, "
        f"{able} of {len(capacity.nodes)} nodes have them" + _beside(capacity)
    )


def usable(capacity: Capacity, aside: Mapping[str, Avoided]) -> Capacity:
    """What is left without these nodes."""
    names = [node_name(one.node_id, one.host) for one in capacity.nodes]
    pairs = zip(names, capacity.nodes, strict=True)
    left = tuple(one for name, one in pairs if name not in aside)
    without = (f"{one} ({aside[one].reason})" for one in sorted(aside.keys() & set(names)))
    return replace(capacity, nodes=left, set_aside=tuple(without))


_UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def _world_size(spec: Mapping[str, Any]) -> int:
    return prod(int(size) for size in spec["parallel"].values() if isinstance(size, int))


def _beside(capacity: Capacity) -> str:
    """`; 1 more are set aside: node1 (cordoned: new cables)`."""
    aside = capacity.set_aside
    if not aside:
        return ""
    rest = [f"{len(aside) - TOLD_NODES} others"] if len(aside) > TOLD_NODES else []
    return f"; {len(aside)} more are set aside: {', '.join([*aside[:TOLD_NODES], *rest])}"


def _take(free: dict[str, list[float]], demand: Demand, *, partly: bool) -> None:
    """Take the demand off the emptiest nodes, as a spread placement does."""
    nodes = _fitting(free, demand)
    if len(nodes) < demand.nodes and not partly:
        return
    for node in nodes[: demand.nodes]:
        free[node][0] -= demand.cpus
        free[node][1] -= demand.gpus


def _fitting(free: dict[str, list[float]], demand: Demand) -> list[str]:
    able = [
        node
        for node, (cpus, gpus) in free.items()
        if cpus + _SLACK >= demand.cpus and gpus + _SLACK >= demand.gpus
    ]
    return sorted(able, key=lambda node: (*(-left for left in free[node]), node))
