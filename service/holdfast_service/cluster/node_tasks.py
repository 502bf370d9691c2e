"""Tasks on chosen nodes that take none of their resources."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from holdfast_service.policy.quarantine import node_name


class NoNode(ConnectionError):
    """The cluster has no node that runs jobs."""


def task_on(node: str, function: Callable[..., Any], code: dict[str, Any] | None = None) -> Any:
    """The function as a task of Ray that takes none of the node's resources. `code`: the options
    of what runs Holdfast's code."""
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": here, **(code or {})}
    return ray.remote(function).options(**options)


def nodes_by_cpus(avoid: Collection[str] = ()) -> list[str]:
    """The ids of the living nodes with CPUs, the largest first, and those whose names are in
    `avoid` last. Raises NoNode."""
    found = [
        (
            node_name(node["NodeID"], node["NodeManagerAddress"]) in avoid,
            -float(node["Resources"].get("CPU", 0.0)),
            node["NodeID"],
        )
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0.0)
    ]
    if not found:
        raise NoNode("the cluster has no node with CPUs")
    return [node for _, _, node in sorted(found)]
