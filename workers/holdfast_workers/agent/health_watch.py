"""Watches a node's health: one thread reads the probes, evaluates the values and reports changes.

It never acts. A probe that fails loses its own values, and is never taken for healthy; an exception
is logged, and ends only that check.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import structlog

from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.agent.background_threads import PeriodicThread
from holdfast_workers.checkpoint.storage import local_folder
from holdfast_workers.health import host
from holdfast_workers.health.evaluator import HealthLimits, changed, evaluate
from holdfast_workers.health.findings import HealthSnapshot, Xid
from holdfast_workers.health.nvml import Accelerators, NvmlUnavailable
from holdfast_workers.protocol.findings import HealthFinding

XIDS_KEPT = 1000
"""XIDs kept for each number of each device, so that frequent ones never displace others."""
STOP_S = 1.0
_log = structlog.get_logger()


@dataclass(frozen=True)
class HealthProbes:
    """The sources of values. `accelerators` None: the job uses no device of this node, or NVML is
    unavailable."""

    folders: tuple[str, ...]
    interface: str
    accelerators: Accelerators | None
    root: Path = host.ROOT

    @classmethod
    def of(cls, config: AgentConfig) -> HealthProbes:
        remote = local_folder(config.plan.remote_root)
        folders = (config.memory_root, config.cache_dir, *([str(remote)] if remote else []))
        accelerators = None
        if config.gpus_per_worker:
            try:
                accelerators = Accelerators.of_this_node()
            except (NvmlUnavailable, ImportError) as error:
                _log.warning("the health of the devices cannot be measured", error=str(error))
        return cls(folders, config.env.get("GLOO_SOCKET_IFNAME", ""), accelerators)

    def observe(self, now: float, workers: int) -> tuple[HealthSnapshot, tuple[Xid, ...]]:
        """Read all probes, and the XIDs that arrived since the last call."""
        devices = None if self.accelerators is None else self.accelerators.read()
        observed = HealthSnapshot(
            at=now,
            devices=devices,
            host=host.read_host(self.folders, self.root),
            network=host.read_network(self.interface, self.root) if self.interface else None,
            workers=workers,
        )
        xids = () if self.accelerators is None else self.accelerators.xids(now)
        return observed, xids


class HealthWatch:
    """The watch's thread calls `on_change(findings)`; `workers()` is the number of live workers."""

    def __init__(
        self,
        open_probes: Callable[[], HealthProbes],
        interval_s: float,
        workers: Callable[[], int],
        on_change: Callable[[tuple[HealthFinding, ...]], None],
        limits: HealthLimits | None = None,
    ) -> None:
        self._open_probes = open_probes
        self._workers = workers
        self._on_change = on_change
        self._limits = limits or HealthLimits()
        self._history: deque[HealthSnapshot] = deque()
        self._xids: dict[tuple[str, int], deque[Xid]] = {}
        self._lock = threading.Lock()
        self._findings: tuple[HealthFinding, ...] = ()
        self._probes: HealthProbes | None = None
        self._thread = PeriodicThread("health", interval_s, self._check_once, self._close)

    @property
    def findings(self) -> tuple[HealthFinding, ...]:
        """The findings of the last check."""
        return self._findings

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread. If a probe is stuck in the kernel, the thread ends with the process."""
        self._thread.stop(STOP_S)

    def inject_xid(self, number: int) -> None:
        """Make the next check find this XID, as an injected fault. Thread-safe."""
        self._keep_xid(Xid("injected", number, time.monotonic()))

    def check(self, probes: HealthProbes, now: float) -> None:
        """Read and evaluate once; calls `on_change` if a finding is new or has gone."""
        observed, xids = probes.observe(now, self._workers())
        for xid in xids:
            self._keep_xid(xid)
        self._history.append(observed)
        while self._history[0].at < now - self._limits.window_s:
            self._history.popleft()
        found = evaluate(self._history[0], observed, self._kept_xids(), self._limits)
        before, self._findings = self._findings, found
        if changed(before, found):
            self._on_change(found)

    def _keep_xid(self, xid: Xid) -> None:
        with self._lock:
            same = self._xids.setdefault((xid.device, xid.number), deque(maxlen=XIDS_KEPT))
            same.append(xid)

    def _kept_xids(self) -> tuple[Xid, ...]:
        with self._lock:
            return tuple(chain.from_iterable(self._xids.values()))

    def _check_once(self) -> None:
        self._probes = self._probes or self._open_probes()
        self.check(self._probes, time.monotonic())

    def _close(self) -> None:
        if self._probes is not None and self._probes.accelerators is not None:
            self._probes.accelerators.close()
