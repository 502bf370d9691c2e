"""Tasks on chosen nodes that take none of their resources: installations, and looks for paths."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple
from typing import Any

import ray
import structlog
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from holdfast_service.diagnosis.unfit_software import cannot_load
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.policy.quarantine import node_name
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.data.source_search import is_folder, may_exist
from holdfast_workers.errors import WorkersError
from holdfast_workers.node_cache.cached_file import cache_folder
from holdfast_workers.packages.installation import install, resolve
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.spec import DataSpec
from holdfast_workers.token_sets.samples import first_samples


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


_log = structlog.get_logger()


def begin_installation(
    node: str, requirements: Sequence[str], timeout_s: float, code: dict[str, Any]
) -> Any:
    """The reference of the answer: (the node's host, the exact requirements, why they cannot be
    installed). `code`: the options of what runs Holdfast's code. Raises errors of Ray."""
    return task_on(node, _install_here, code).remote(list(requirements), timeout_s)


def _install_here(requirements: list[str], timeout_s: float) -> tuple[str, list[str], str]:
    host, end = ray.util.get_node_ip_address(), time.monotonic() + timeout_s
    stop = threading.Event()
    try:
        cache = cache_folder(os.environ)
        pins = resolve(requirements, cache, timeout_s, stop)
        install(pins, cache, end - time.monotonic(), stop)
    except Exception as error:  # an answer, too: otherwise the job would try it for ever
        return host, [], _cause(error)
    return host, list(pins), ""


def _cause(error: Exception) -> str:
    """The error as text for users, without paths of the node."""
    if isinstance(error, WorkersError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"the folder of packages cannot be used: {error.strerror}"
    _log.error("packages.failed", exc_info=error)
    return f"an unexpected error ({type(error).__name__}): see the log of Ray's worker there"


def begin_samples(
    node: str, spec: JobSpec, count: int, store: StorageOptions, code: dict[str, Any]
) -> Any:
    """The reference of the answer: (the first samples, each as the fields of `SampleText`; why they
    cannot be read). `code`: the options of what runs Holdfast's code. Raises errors of Ray."""
    parts = (spec.data, spec.model.sequence_length, spec.train.seed)
    return task_on(node, _read_samples, code).remote(*parts, count, store)


def _read_samples(
    data: DataSpec, sequence_length: int, seed: int, count: int, store: StorageOptions
) -> tuple[list[tuple[int, str, int, str]], str]:
    try:
        found = first_samples(
            data, sequence_length, seed, count, lambda uri: open_storage(uri, store)
        )
    except (WorkersError, OSError) as error:
        return [], str(error)
    except Exception as error:
        return [], _cause(error)
    return [astuple(sample) for sample in found], ""


def look_for(
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
