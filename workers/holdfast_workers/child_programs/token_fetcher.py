"""The process that brings a job's token sets into the cache of its node, and holds them there.

It fetches what is missing, then again what goes. Its locks end with it, and it ends with the agent.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from functools import cache
from pathlib import Path

import structlog

from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import Storage
from holdfast_workers.errors import WorkersError
from holdfast_workers.fault_injection.failing_storage import with_injected_failures
from holdfast_workers.ipc import control_channel
from holdfast_workers.protocol.processes import FetcherJob, StorageRefusal, StorageZygoteConfig
from holdfast_workers.token_sets.node_fetch import FetchProgress, fetch

_log = structlog.get_logger()


def run(end: socket.socket, job: FetcherJob, config: StorageZygoteConfig) -> int:
    """Returns once the agent is gone."""
    stop = threading.Event()
    threading.Thread(target=_fetch, args=(job, config, stop), name="fetch", daemon=True).start()
    with contextlib.suppress(control_channel.ControlClosed):
        control_channel.receive(end, StorageRefusal)  # the agent sends nothing
    stop.set()
    return 0


def _fetch(job: FetcherJob, config: StorageZygoteConfig, stop: threading.Event) -> None:
    faults = Path(config.storage_fault_file)

    @cache  # each has connections of its own, and reads its credentials
    def open_set(uri: str) -> Storage:
        return with_injected_failures(open_storage(uri, config.storage), faults)

    spec, progress = config.plan.spec, FetchProgress(0, 0, 0, 0)

    def keep(now: FetchProgress) -> None:
        nonlocal progress
        progress = now

    began = time.monotonic()
    try:
        fetch(
            spec.data,
            spec.model.sequence_length,
            spec.train.seed,
            open_set,
            Path(job.cache_dir),
            stop,
            keep,
        )
    except WorkersError:  # its reason is left for the ranks
        _log.exception("the token sets are not fetched")
        return
    if not stop.is_set():
        _log.info(
            "the token sets are here",
            shards=progress.shards,
            nbytes=progress.nbytes,
            took_s=round(time.monotonic() - began, 3),
        )
