"""What the nodes of a cluster have, in use or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class NodeCapacity:
    """The resources of one node, in use or not."""

    node_id: str
    host: str
    cpus: float
    gpus: float
    foreign_cpus: float = 0.0  # in use by other programs on the cluster
    foreign_gpus: float = 0.0
    custom: Mapping[str, float] = field(default_factory=dict)  # Ray's custom resources
    foreign_custom: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    head: bool = False  # the head of the cluster runs on it


@dataclass(frozen=True)
class Capacity:
    """The resources of the cluster. `can_grow`: it adds nodes on demand."""

    nodes: tuple[NodeCapacity, ...]
    can_grow: bool
    unlimited: bool = False  # room for every job, whatever the nodes: of a simulated cluster
    placed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The nodes on which each job has its place already, by job id."""
