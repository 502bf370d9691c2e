"""Looks for a path on a node that runs jobs, in a task that takes none of its resources."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import RayTaskError

from holdfast_service.cluster.node_tasks import nodes_by_cpus, task_on
from holdfast_service.diagnosis.unfit_software import cannot_load
from holdfast_workers.data.source_search import is_folder, may_exist


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
            if not cannot_load(error):
                raise
    return _look_on(nodes[-1], source, folder, end - time.monotonic(), code)


def _look_on(
    node: str, source: str, folder: bool, timeout_s: float, code: dict[str, Any]
) -> tuple[str, bool, str]:
    task = task_on(node, _look_here, code).remote(source, folder)
    try:
        host, exists, why = ray.get(task, timeout=max(0.0, timeout_s))
    finally:
        ray.cancel(task, force=True)  # a file system that hangs holds no process for ever
    return str(host), bool(exists), str(why)


def _look_here(source: str, folder: bool) -> tuple[str, bool, str]:
    host = ray.util.get_node_ip_address()
    try:
        return host, is_folder(source) if folder else may_exist(source), ""
    except OSError as error:
        return host, False, f"cannot be read: {error.strerror}"
