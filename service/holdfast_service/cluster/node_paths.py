"""Looks for a path on a node that runs jobs, in a task that takes none of its resources."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from holdfast_service.diagnosis.unfit_software import NOT_LOADED
from holdfast_service.policy.quarantine import node_name
from holdfast_workers.data.source_search import is_folder, may_exist


class NoNode(ConnectionError):
    """The cluster has no node that runs jobs."""


def look(
    source: str, folder: bool, timeout_s: float, code: dict[str, Any]
) -> tuple[str, bool, str]:
    """The node's host; whether it has the path; why that cannot be read. `code`: the options of
    what runs Holdfast's code. Nodes without Holdfast are passed over. Blocks. Raises errors of Ray
    (GetTimeoutError after `timeout_s`) and NoNode."""
    end, nodes = time.monotonic() + timeout_s, nodes_by_cpus()
    for node in nodes[:-1]:
        try:
            return _look_on(node, source, folder, end - time.monotonic(), code)
        except RayTaskError as error:
            if NOT_LOADED not in str(error):
                raise
    return _look_on(nodes[-1], source, folder, end - time.monotonic(), code)


def task_on(node: str, function: Callable[..., Any], code: dict[str, Any]) -> Any:
    """The function as a task of Ray that takes none of the node's resources."""
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": here, **code}
    return ray.remote(function).options(**options)


def _look_on(
    node: str, source: str, folder: bool, timeout_s: float, code: dict[str, Any]
) -> tuple[str, bool, str]:
    task = task_on(node, _look_here, code).remote(source, folder)
    try:
        host, exists, why = ray.get(task, timeout=max(0.0, timeout_s))
    finally:
        ray.cancel(task, force=True)  # a file system that hangs holds no process for ever
    return str(host), bool(exists), str(why)


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


def _look_here(source: str, folder: bool) -> tuple[str, bool, str]:
    host = ray.util.get_node_ip_address()
    try:
        return host, is_folder(source) if folder else may_exist(source), ""
    except OSError as error:
        return host, False, f"cannot be read: {error.strerror}"
