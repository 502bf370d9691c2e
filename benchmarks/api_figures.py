"""The figures and required bounds of `benchmarks.api`; pure, without I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BARS = {
    "read_p99_ms": 50.0,
    "transition_p99_ms": 250.0,
    "event_p99_ms": 1000.0,
    "token_check_p99_ms": 0.2,
}
CLIENTS_BAR = 1000
TOKEN = "of-a-benchmark-on-loopback-" + "0" * 16
"""Of the server that is measured."""


@dataclass(frozen=True)
class ApiFigures:
    """The figures of one database. `stolen` is a share of the wanted processor time; `cores_used`
    has the processors used by each part."""

    submissions_per_s: float
    until_all_ran_s: float
    reads_per_s: float
    reads: int
    read_p50_ms: float
    read_p99_ms: float
    read_p99_ms_by_call: dict[str, float]
    transitions: int
    transition_p50_ms: float
    transition_p99_ms: float
    transition_max_ms_by_order: dict[str, float]
    events: int
    event_p50_ms: float
    event_p99_ms: float
    token_checks: int
    token_check_p50_ms: float
    token_check_p99_ms: float
    sse_clients: int
    sse_lost: int
    sse_messages_per_s_each: float
    sse_mb_per_s: float
    cores_used: dict[str, float]
    stolen: float
    load_late_p99_ms: float

    def missed(self, clients: int) -> dict[str, str]:
        """Bar -> message on how far it was missed. `clients`: the number of wanted streams."""
        missed = {
            name: f"{found:g} ms instead of {bar:g} ms, {found / bar:.1f} times as much"
            for name, bar in BARS.items()
            if not (found := getattr(self, name)) <= bar
        }
        wanted = min(clients, CLIENTS_BAR)
        if self.sse_clients < wanted:
            missed["sse_clients"] = f"{self.sse_clients} instead of {wanted}"
        return missed


@dataclass(frozen=True)
class ApiResult:
    """The last line: the worst figure of all databases, and each database, if it was measured."""

    jobs: int
    kept_awake: bool
    load: float
    """The share of the time of all processors that a load beside the measurement was to take."""
    read_p99_ms: float
    transition_p99_ms: float
    event_p99_ms: float
    sse_clients: int
    submissions_per_s: float
    reads_per_s: float
    missed: dict[str, dict[str, str]]
    sqlite: ApiFigures | None
    postgresql: ApiFigures | None


def api_summary(
    found: Mapping[str, ApiFigures], *, jobs: int, clients: int, kept_awake: bool, load: float
) -> ApiResult:
    return ApiResult(
        jobs=jobs,
        kept_awake=kept_awake,
        load=load,
        read_p99_ms=max(figures.read_p99_ms for figures in found.values()),
        transition_p99_ms=max(figures.transition_p99_ms for figures in found.values()),
        event_p99_ms=max(figures.event_p99_ms for figures in found.values()),
        sse_clients=min(figures.sse_clients for figures in found.values()),
        submissions_per_s=min(figures.submissions_per_s for figures in found.values()),
        reads_per_s=min(figures.reads_per_s for figures in found.values()),
        missed={kind: figures.missed(clients) for kind, figures in found.items()},
        sqlite=found.get("sqlite"),
        postgresql=found.get("postgresql"),
    )


def milliseconds(times_s: Sequence[float], share: float, digits: int = 1) -> float:
    """A quantile, in milliseconds; raises ValueError if there are no times."""
    if not times_s:
        raise ValueError("no call was timed: measure for more --seconds")
    ordered = sorted(times_s)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], digits)
