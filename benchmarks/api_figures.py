"""The figures and required bounds of `benchmarks.api`; pure, without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BARS = {"reads": 50.0, "transitions": 250.0, "events": 1000.0, "token_checks": 0.2}
"""Of the 99th percentile, in ms."""
CLIENTS_BAR = 1000
TOKEN = "of-a-benchmark-on-loopback-" + "0" * 16
"""Of the server that is measured."""


@dataclass(frozen=True)
class Latency:
    calls: int
    p50_ms: float
    p99_ms: float
    greatest_ms: float


def latency(times_s: Sequence[float]) -> Latency:
    """Raises ValueError if there are no times."""
    if not times_s:
        raise ValueError("no call was timed: measure for more --seconds")
    ordered = [round(1000 * seconds, 4) for seconds in sorted(times_s)]
    middle, high = (ordered[int(share * len(ordered))] for share in (0.5, 0.99))
    return Latency(len(ordered), middle, high, ordered[-1])


@dataclass(frozen=True)
class ApiFigures:
    """The figures of one database. `stolen` is a share of the wanted processor time; `cores_used`
    has the processors used by each part."""

    submissions_per_s: float
    until_all_ran_s: float
    reads_per_s: float
    reads: Latency
    reads_by_call: dict[str, Latency]
    transitions: Latency
    transitions_by_order: dict[str, Latency]
    events: Latency
    token_checks: Latency
    sse_clients: int
    sse_lost: int
    sse_messages_per_s_each: float
    sse_mb_per_s: float
    cores_used: dict[str, float]
    stolen: float
    load_late: Latency

    def missed(self, clients: int) -> dict[str, str]:
        """Bar -> message on how far it was missed. `clients`: the number of wanted streams."""
        missed = {
            name: f"{found:g} ms instead of {bar:g} ms, {found / bar:.1f} times as much"
            for name, bar in BARS.items()
            if not (found := getattr(self, name).p99_ms) <= bar
        }
        wanted = min(clients, CLIENTS_BAR)
        if self.sse_clients < wanted:
            missed["sse_clients"] = f"{self.sse_clients} instead of {wanted}"
        return missed


@dataclass(frozen=True)
class ApiResult:
    """The last line: each database, and what it missed."""

    jobs: int
    load: float
    """The share of the time of all processors that a load beside the measurement was to take."""
    missed: dict[str, dict[str, str]]
    databases: dict[str, ApiFigures]
