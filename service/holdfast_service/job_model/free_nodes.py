"""What the nodes of a cluster have left, in the order in which jobs take it. Pure.

Nodes in quarantine come last, then those with most free first. The order is kept up to date as
room is taken, so that the best nodes for a bundle are found without a look at all others. Room is
only ever taken: a bundle that had too few nodes once has no more of them later. A node that is kept
for a job leaves the order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast_service.job_model.node_labels import SLACK, LabelRule, has_amounts
from holdfast_service.job_model.supervisor_protocol import Capacity, NodeCapacity
from holdfast_service.policy.quarantine import Avoided, NodeStanding, node_name

CPU, GPU = "CPU", "GPU"


@dataclass
class FreeNode:
    """What no job and no other program uses on a node, by resource, and the node's labels."""

    amounts: dict[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    def has_room(self, amounts: Mapping[str, float], labels: Sequence[LabelRule]) -> bool:
        return has_amounts(self.amounts, amounts) and all(r.allows(self.labels) for r in labels)


_Place = tuple[float, float, str]
"""The place of a node in the order: (-CPUs, -GPUs, id)."""


class FreeNodes:
    """The free resources of the nodes, by node id."""

    def __init__(self, capacity: Capacity, aside: Mapping[str, Avoided]) -> None:
        """`aside`: the nodes that are set aside, by name or id; no job takes a cordoned one."""
        self.names = {node.node_id: node_name(node.node_id, node.host) for node in capacity.nodes}
        self._whole, self._free = _for_jobs(capacity), _for_jobs(capacity)
        self._ready: list[_Place] = []
        self._quarantined: list[_Place] = []
        self._cordoned: list[_Place] = []
        self._kept: list[_Place] = []
        self._list_of = {node: self._list_for(aside, node) for node in self._free}
        for node, places in self._list_of.items():
            places.append(self._place(node))
        for places in (self._ready, self._quarantined, self._cordoned):
            places.sort()

    def __contains__(self, node: str) -> bool:
        return node in self._free

    def is_quarantined(self, node: str) -> bool:
        return self._list_of[node] is self._quarantined

    def best_first(self) -> Iterator[str]:
        """All nodes that a job may have, with room or without. Nothing may be taken meanwhile."""
        return (node for places in (self._ready, self._quarantined) for _, _, node in places)

    def keep(self, node: str) -> None:
        """Take the node out of the order."""
        self._leave(node)
        self._list_of[node] = self._kept
        self._enter(node)

    def has_room(
        self, node: str, amounts: Mapping[str, float], labels: Sequence[LabelRule]
    ) -> bool:
        return self._free[node].has_room(amounts, labels)

    def with_room(self, amounts: Mapping[str, float], labels: Sequence[LabelRule]) -> Iterator[str]:
        """The nodes that have room for a bundle, the best first. Nothing may be taken meanwhile."""
        cpus = amounts[CPU]
        for places in (self._ready, self._quarantined):
            for minus_cpus, _, node in places:
                if SLACK - minus_cpus < cpus:
                    break  # and so have all that follow
                if self.has_room(node, amounts, labels):
                    yield node

    def large_enough(
        self, amounts: Mapping[str, float], labels: Sequence[LabelRule]
    ) -> Iterator[str]:
        """The nodes that would have room for a bundle if no job were there, in any order."""
        for node, whole in self._whole.items():
            if self._list_of[node] is not self._cordoned and whole.has_room(amounts, labels):
                yield node

    def take(self, node: str, amounts: Mapping[str, float]) -> None:
        left = self._free[node].amounts
        self._leave(node)
        for name, amount in amounts.items():
            left[name] = left.get(name, 0.0) - amount
        self._enter(node)

    def _leave(self, node: str) -> None:
        places = self._list_of[node]
        del places[bisect_left(places, self._place(node))]

    def _enter(self, node: str) -> None:
        insort(self._list_of[node], self._place(node))

    def _place(self, node: str) -> _Place:
        left = self._free[node].amounts
        return -left[CPU], -left[GPU], node

    def _list_for(self, aside: Mapping[str, Avoided], node: str) -> list[_Place]:
        by_id, by_name = aside.get(node), aside.get(self.names[node])
        if any(found and found.standing is NodeStanding.CORDONED for found in (by_id, by_name)):
            return self._cordoned
        is_ready = by_name is None or by_name.standing is not NodeStanding.QUARANTINED
        return self._ready if is_ready else self._quarantined


def _for_jobs(capacity: Capacity) -> dict[str, FreeNode]:
    """What the jobs may use of each node: all that other programs do not."""
    return {node.node_id: FreeNode(_left_for_jobs(node), node.labels) for node in capacity.nodes}


def _left_for_jobs(node: NodeCapacity) -> dict[str, float]:
    foreign = node.foreign_custom
    custom = {name: amount - foreign.get(name, 0.0) for name, amount in node.custom.items()}
    return {CPU: node.cpus - node.foreign_cpus, GPU: node.gpus - node.foreign_gpus, **custom}
