"""Looks for a path on a node that runs jobs, in a task that takes none of its resources."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from holdfast_workers.data.source_search import is_folder, may_exist


class NoNode(ConnectionError):
    """The cluster has no node that runs jobs."""


def look(source: str, folder: bool, timeout_s: float) -> tuple[str, bool, str]:
    """The node's host; whether it has the path; why that cannot be read. Blocks. Raises errors of
    Ray (GetTimeoutError after `timeout_s`) and NoNode."""
    task = on_a_node(_look_here).remote(source, folder)
    try:
        host, exists, why = ray.get(task, timeout=timeout_s)
    finally:
        ray.cancel(task, force=True)  # a file system that hangs holds no process for ever
    return str(host), bool(exists), str(why)


def on_a_node(function: Callable[..., Any]) -> Any:
    """The function as a task of Ray on a node that runs jobs; it takes none of its resources.
    Raises errors of Ray and NoNode."""
    here = NodeAffinitySchedulingStrategy(_node_with_most_cpus(), soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=here)


def _node_with_most_cpus() -> str:
    """Of the living nodes; its id. Raises NoNode."""
    cpus = {
        node["NodeID"]: float(node["Resources"].get("CPU", 0.0))
        for node in ray.nodes()
        if node["Alive"]
    }
    if not any(cpus.values()):
        raise NoNode("the cluster has no node with CPUs")
    return str(max(sorted(cpus), key=lambda node: cpus[node]))


def _look_here(source: str, folder: bool) -> tuple[str, bool, str]:
    host = ray.util.get_node_ip_address()
    try:
        return host, is_folder(source) if folder else may_exist(source), ""
    except OSError as error:
        return host, False, f"cannot be read: {error.strerror}"
