"""A node agent's part in its node's health: what it finds, and that it says so.

Owns the slow watch and the check before use; whatever they find, the agent goes on: what follows
is decided elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.agent.health_watch import HealthWatch, Probes
from holdfast_workers.agent.signal_sender import Teller
from holdfast_workers.health.findings import Finding, Level
from holdfast_workers.health.preflight import Checked
from holdfast_workers.ipc import control_channel
from holdfast_workers.ipc.children import Brood, ZygoteFailed
from holdfast_workers.ipc.io_loop import NodeIO
from holdfast_workers.protocol.messages import SignalKind

TRIES = 4
PAUSE_S = 10.0
"""A check that did not end well is made so often, with such a pause: that may have been chance."""


@dataclass(frozen=True)
class HealthReport:
    """`number` grows with each change."""

    number: int
    findings: tuple[Finding, ...]
    measured: dict[str, float]

    def data(self) -> dict[str, Any]:
        """As agents report it."""
        found = tuple(one.data() for one in self.findings)
        return {"health": self.number, "findings": found, "measured": self.measured}


class NodeHealth:
    """Thread-safe. `attempt()` is the one that signals are to name, `workers()` how many live."""

    def __init__(
        self,
        config: AgentConfig,
        brood: Brood,
        teller: Teller,
        attempt: Callable[[], int],
        workers: Callable[[], int],
    ) -> None:
        self._config = config
        self._brood = brood
        self._teller = teller
        self._attempt = attempt
        self._watch = HealthWatch(
            lambda: Probes.of(config), config.health_interval_s, workers, self._watched
        )
        self._lock = threading.Lock()
        self._checking = threading.Lock()
        self._checks = 0
        self._stopped = False
        self._again: threading.Timer | None = None
        self._number = 0
        self._seen: tuple[Finding, ...] = ()
        self._checked = Checked((), {})

    def start(self) -> None:
        self._watch.start()

    def stop(self) -> None:
        self._stopped = True
        if self._again is not None:
            self._again.cancel()
        self._watch.stop()

    def pretend_xid(self, number: int) -> None:
        self._watch.pretend_xid(number)

    def report(self) -> HealthReport:
        """All that there is now."""
        with self._lock:
            found = (*self._checked.findings, *self._seen)
            return HealthReport(self._number, found, self._checked.measured)

    def check(self, io: NodeIO, tries: int = TRIES) -> None:
        """Check processor and devices; what is found is in the reports from then on. One that
        cannot be brought to its end is a finding too, and made again later, in the background."""
        unfinished = False
        with self._checking:
            self._checks += 1
            try:
                request = {
                    "devices": bool(self._config.gpus_per_worker),
                    "memory_floor_gb_per_s": self._config.memory_floor_gb_per_s,
                }
                child = self._brood.fork("preflight", f"preflight-{self._checks}", request)
                answer = io.run_to_end(child, self._config.preflight_timeout_s)
                checked = Checked.from_message(answer)
            except TimeoutError:
                unfinished = True
                checked = _unfinished(f"was not through in {self._config.preflight_timeout_s:g} s")
            except (ZygoteFailed, ChildProcessError, OSError) as error:
                unfinished = True
                checked = _unfinished(f"failed: {control_channel.shortened(str(error))}")
        with self._lock:
            self._checked = checked
        self._tell()
        if unfinished and tries > 1 and not self._stopped:
            self._again = threading.Timer(PAUSE_S, self.check, (io, tries - 1))
            self._again.daemon = True
            self._again.start()

    def _watched(self, findings: tuple[Finding, ...]) -> None:
        with self._lock:
            self._seen = findings
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            self._number += 1
        self._teller.tell(SignalKind.NODE_UNWELL, self._attempt(), detail=self.report().data())


def _unfinished(why: str) -> Checked:
    what = f"the check of the node before its use {why}"
    return Checked((Finding("preflight", "unfinished", Level.UNFIT, what),), {})
