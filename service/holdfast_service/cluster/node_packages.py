"""Installs a job's packages on a node, in a task that takes none of its resources."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
import structlog

from holdfast_service.cluster.node_tasks import task_on
from holdfast_workers.errors import WorkersError
from holdfast_workers.node_cache.cached_file import cache_folder
from holdfast_workers.packages.installation import install, resolve

_log = structlog.get_logger()


def begin(node: str, requirements: Sequence[str], timeout_s: float, code: dict[str, Any]) -> Any:
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
