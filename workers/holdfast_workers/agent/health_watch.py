"""A node's slow eye on its own health: one thread that reads, has it judged, and tells of changes.

It never acts. A probe that fails costs its own values, and is not heard of as good news; a look
that fails costs that look, and says why.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.agent.periodic_thread import Turns
from holdfast_workers.checkpoint.storage import local_folder
from holdfast_workers.health import host
from holdfast_workers.health.evaluator import HealthLimits, changed, evaluate
from holdfast_workers.health.findings import Finding, Observed, Xid
from holdfast_workers.health.nvml import Accelerators, NoLibrary

XIDS_KEPT = 1000
"""Of each number of each device: however many others come, none is forgotten for them."""
STOP_S = 1.0


@dataclass(frozen=True)
class Probes:
    """What is looked at. `accelerators` None: no device of this node is the job's, or there is
    nothing to ask."""

    folders: tuple[str, ...]
    interface: str
    accelerators: Accelerators | None
    root: Path = host.ROOT

    @classmethod
    def of(cls, config: AgentConfig) -> Probes:
        remote = local_folder(config.remote_root)
        folders = (config.memory_root, config.cache_dir, *([str(remote)] if remote else []))
        accelerators = None
        if config.gpus_per_worker:
            try:
                accelerators = Accelerators.of_this_node()
            except (NoLibrary, ImportError) as error:
                print(f"the health of the devices cannot be measured: {error}", flush=True)
        return cls(folders, config.env.get("GLOO_SOCKET_IFNAME", ""), accelerators)

    def observe(self, now: float, workers: int) -> tuple[Observed, tuple[Xid, ...]]:
        """All that can be read now, and the XIDs that came since the last time."""
        devices = None if self.accelerators is None else self.accelerators.read()
        observed = Observed(
            at=now,
            devices=devices,
            host=host.read_host(self.folders, self.root),
            network=host.read_network(self.interface, self.root) if self.interface else None,
            workers=workers,
        )
        xids = () if self.accelerators is None else self.accelerators.xids(now)
        return observed, xids


class HealthWatch:
    """`on_change(findings)` is called by the watch's thread; `workers()` says how many live."""

    def __init__(
        self,
        make_probes: Callable[[], Probes],
        interval_s: float,
        workers: Callable[[], int],
        on_change: Callable[[tuple[Finding, ...]], None],
        limits: HealthLimits | None = None,
    ) -> None:
        self._make_probes = make_probes
        self._workers = workers
        self._on_change = on_change
        self._limits = limits or HealthLimits()
        self._history: deque[Observed] = deque()
        self._xids: dict[tuple[str, int], deque[Xid]] = {}
        self._lock = threading.Lock()
        self._findings: tuple[Finding, ...] = ()
        self._probes: Probes | None = None
        self._turns = Turns("health", interval_s, self._turn, self._close)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """As of the last look."""
        return self._findings

    def start(self) -> None:
        self._turns.start()

    def stop(self) -> None:
        """End the thread, unless a probe is stuck in the kernel: then it ends with the process."""
        self._turns.stop(STOP_S)

    def pretend_xid(self, number: int) -> None:
        """Let the next look find this XID, as an injected fault; thread-safe."""
        self._keep(Xid("injected", number, time.monotonic()))

    def look(self, probes: Probes, now: float) -> None:
        """One look; tells if something is new, or over."""
        observed, xids = probes.observe(now, self._workers())
        for one in xids:
            self._keep(one)
        self._history.append(observed)
        while self._history[0].at < now - self._limits.window_s:
            self._history.popleft()
        found = evaluate(self._history[0], observed, self._kept(), self._limits)
        before, self._findings = self._findings, found
        if changed(before, found):
            self._on_change(found)

    def _keep(self, xid: Xid) -> None:
        with self._lock:
            same = self._xids.setdefault((xid.device, xid.number), deque(maxlen=XIDS_KEPT))
            same.append(xid)

    def _kept(self) -> tuple[Xid, ...]:
        with self._lock:
            return tuple(chain.from_iterable(self._xids.values()))

    def _turn(self) -> None:
        self._probes = self._probes or self._make_probes()
        self.look(self._probes, time.monotonic())

    def _close(self) -> None:
        if self._probes is not None and self._probes.accelerators is not None:
            self._probes.accelerators.close()
