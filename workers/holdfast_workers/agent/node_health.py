"""Reports a node's health findings to the supervisor.

Owns the periodic watch and the check before first use. The agent goes on whatever they find: the
supervisor decides the consequences.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import structlog

from holdfast_workers.agent import node_room
from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.agent.health_watch import HealthProbes, HealthWatch
from holdfast_workers.agent.signal_sender import SignalSender
from holdfast_workers.errors import WorkersError
from holdfast_workers.ipc import control_channel
from holdfast_workers.ipc.children import ChildProcesses
from holdfast_workers.ipc.io_loop import NodeIO
from holdfast_workers.protocol.findings import HealthFinding, HealthReport, Level
from holdfast_workers.protocol.processes import PreflightJob, PreflightResult
from holdfast_workers.protocol.signals import NodeUnwell

_log = structlog.get_logger()

TRIES = 4
PAUSE_S = 10.0
"""How often a check that was not completed is tried, and the pause between tries: the failure may
have been chance. After the same pause the room of a node that is too small is looked up again."""


class NodeHealth:
    """Thread-safe. `attempt()`: the attempt that signals name; `workers()`: the number of live
    workers."""

    def __init__(
        self,
        config: AgentConfig,
        child_processes: ChildProcesses,
        signals: SignalSender,
        attempt: Callable[[], int],
        workers: Callable[[], int],
        runs_ranks: Callable[[], bool] = lambda: False,
    ) -> None:
        """`runs_ranks()`: whether any rank of the job is on this node."""
        self._config = config
        self._child_processes = child_processes
        self._signals = signals
        self._attempt = attempt
        self._runs_ranks = runs_ranks
        self._watch = HealthWatch(
            lambda: HealthProbes.of(config), config.health_interval_s, workers, self._on_findings
        )
        self._lock = threading.Lock()
        self._checking = threading.Lock()
        self._checks = 0
        self._stopped = False
        self._again: threading.Timer | None = None
        self._number = 0
        self._watch_findings: tuple[HealthFinding, ...] = ()
        self._preflight = PreflightResult((), {})
        self._shortages: tuple[HealthFinding, ...] = ()

    def start(self) -> None:
        self._watch.start()

    def stop(self) -> None:
        self._stopped = True
        if self._again is not None:
            self._again.cancel()
        self._watch.stop()

    def inject_xid(self, number: int) -> None:
        self._watch.inject_xid(number)

    def report(self) -> HealthReport:
        """The present findings and measurements."""
        with self._lock:
            found = (*self._preflight.findings, *self._shortages, *self._watch_findings)
            return HealthReport(self._number, found, self._preflight.measured)

    def check(self, io: NodeIO, tries: int = TRIES) -> None:
        """Check room, processor and devices; reports contain the findings from then on. A check
        that cannot be completed is itself a finding, and is repeated later in the background."""
        unfinished = False
        with self._checking:
            shortages = self._find_shortages()
            self._checks += 1
            try:
                job = PreflightJob(
                    bool(self._config.gpus_per_worker), self._config.memory_floor_gb_per_s
                )
                child = self._child_processes.fork(f"preflight-{self._checks}", job)
                checked = io.await_answer(child, self._config.preflight_timeout_s)
            except TimeoutError:
                unfinished = True
                checked = _unfinished(
                    f"was not completed within {self._config.preflight_timeout_s:g} s"
                )
            except (WorkersError, OSError) as error:
                unfinished = True
                checked = _unfinished(f"failed: {control_channel.shorten_middle(str(error))}")
        with self._lock:
            self._preflight, self._shortages = checked, shortages
        self._send_signal()
        if unfinished and tries > 1:
            self._later(self.check, io, tries - 1)
        elif shortages:
            self._later(self._check_room)

    def _check_room(self) -> None:
        """Look again at a room that was too small: others may have left it."""
        try:
            with self._checking:
                shortages = self._find_shortages()
        except OSError:
            _log.exception("the room of the node cannot be measured: it is looked up again")
            self._later(self._check_room)
            return
        with self._lock:
            has_changed = bool(shortages) != bool(self._shortages)
            self._shortages = shortages
        if has_changed:
            self._send_signal()
        if shortages:
            self._later(self._check_room)

    def _find_shortages(self) -> tuple[HealthFinding, ...]:
        folder, needs = Path(self._config.memory_root), self._config.plan.needs
        return node_room.check(folder, needs, runs_ranks=self._runs_ranks())

    def _later(self, check: Callable[..., None], *arguments: object) -> None:
        if self._again is not None:
            self._again.cancel()
        if self._stopped:
            return
        self._again = threading.Timer(PAUSE_S, check, arguments)
        self._again.daemon = True
        self._again.start()

    def _on_findings(self, findings: tuple[HealthFinding, ...]) -> None:
        with self._lock:
            self._watch_findings = findings
        self._send_signal()

    def _send_signal(self) -> None:
        with self._lock:
            self._number += 1
        self._signals.send(NodeUnwell(self.report()), self._attempt())


def _unfinished(why: str) -> PreflightResult:
    what = f"the check of the node before its use {why}"
    return PreflightResult((HealthFinding("preflight", "unfinished", Level.UNFIT, what),), {})
