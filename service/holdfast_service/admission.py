"""Which queued job may start: a pure decision on capacity and on what others hold.

Jobs start in the order of their submission as far as they fit; one that does not fit lets later
ones pass. The count is an estimate on purpose (where bundles really lie, the cluster knows): it
keeps jobs from being started into a wait, and names what a job in the queue waits for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from holdfast_service.job_spec import JobSpec
from holdfast_service.quarantine import node_name
from holdfast_service.reports import Capacity

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
        f"{able} of {len(capacity.nodes)} nodes have them"
        + (f"; {capacity.set_aside} more are set aside" if capacity.set_aside else "")
    )


def usable(capacity: Capacity, avoided: Collection[str]) -> Capacity:
    """What is left without the nodes of these names."""
    left = tuple(n for n in capacity.nodes if node_name(n.node_id, n.host) not in avoided)
    return replace(capacity, nodes=left, set_aside=len(capacity.nodes) - len(left))


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
