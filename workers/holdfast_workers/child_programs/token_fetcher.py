"""The process that brings a job's token sets into the cache of its node, and holds there what the
node's ranks read.

It fetches what is missing, then again what goes, and what comes next as the ranks go on. Its locks
end with it. It ends with the agent, or once the fetch has failed for a reason that a repetition
does not mend: another one takes its place.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue

import structlog

from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import Storage
from holdfast_workers.fault_injection.failing_storage import with_injected_failures
from holdfast_workers.ipc import control_channel
from holdfast_workers.memory.cache_transfer import RemoteCache
from holdfast_workers.memory.peer_tls import peer_tls
from holdfast_workers.protocol.processes import FetcherJob, FetchOrder, StorageZygoteConfig
from holdfast_workers.token_sets.node_fetch import FetchProgress, fetch
from holdfast_workers.token_sets.partner_caches import PartnerCaches

AGAIN_AFTER_S = 30.0
"""From a failure of the fetch to the end of the process, which the agent replaces."""

_log = structlog.get_logger()


def run(end: socket.socket, job: FetcherJob, config: StorageZygoteConfig) -> int:
    """Returns 0 once the agent is gone, and 1 some time after the fetch has failed."""
    stop, codes = threading.Event(), SimpleQueue[int]()
    order = job.order

    def until_agent_is_gone() -> None:
        nonlocal order
        try:
            while True:
                order = control_channel.receive(end, FetchOrder)
        except control_channel.ControlClosed:
            pass
        finally:
            codes.put(0)

    def until_fetch_fails() -> None:
        codes.put(_fetch(job, config, stop, lambda: order))

    for work in (until_agent_is_gone, until_fetch_fails):
        threading.Thread(target=work, name=work.__name__, daemon=True).start()
    code = codes.get()
    stop.set()
    return code


def _fetch(
    job: FetcherJob,
    config: StorageZygoteConfig,
    stop: threading.Event,
    order: Callable[[], FetchOrder],
) -> int:
    faults = Path(config.storage_fault_file)
    opened = cache(partial(open_storage, options=config.storage))  # each has connections

    def open_set(uri: str) -> Storage:
        return with_injected_failures(opened(uri), faults)

    connect = partial(RemoteCache, job.secret, tls=peer_tls(job.tls_dir))
    partners = PartnerCaches(job.agent, connect, lambda: order().caches)
    began = time.monotonic()
    is_logged = False

    def log_when_whole(now: FetchProgress) -> None:
        nonlocal is_logged
        if now.is_whole and not is_logged:
            is_logged = True
            took_s = round(time.monotonic() - began, 3)
            what = "the token sets are here" if now.is_all else "the first token groups are here"
            _log.info(
                what,
                shards=now.shards,
                nbytes=now.nbytes,
                from_partners=now.from_partners,
                took_s=took_s,
            )

    try:
        fetch(
            config.plan.spec,
            open_set,
            Path(job.cache_dir),
            stop,
            log_when_whole,
            lambda: order().window,
            partners=partners,
        )
    except Exception:  # its reason is left for the ranks
        _log.exception("the token sets are not fetched")
        stop.wait(AGAIN_AFTER_S)
        return 1
    return 0
