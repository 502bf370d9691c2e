"""Events of the health of ranks and nodes, of guards, and of injected faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from holdfast_service.diagnosis.hang_culprit import HangFinding, RankStack, Suspect
from holdfast_service.job_model.events.kinds import EventKind, JobEvent
from holdfast_workers.fault_injection.kinds import Injection
from holdfast_workers.protocol.findings import HealthFinding, TripReport


@dataclass(frozen=True, kw_only=True)
class StalledEvent(JobEvent):
    """Ranks are in a phase for longer than its learned limit, and no fault is visible."""

    kind = EventKind.STALLED
    attempt: int
    step: int = 0
    finding: HangFinding
    reason: str = ""
    accused: tuple[int, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    stacks: tuple[RankStack, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StragglerEvent(JobEvent):
    """A rank needs `factor` times its peers' time, or does so no longer."""

    kind = EventKind.STRAGGLER
    rank: int
    agent: str = ""
    node_id: str = ""
    host: str = ""
    factor: float = 1.0
    since_step: int = 0
    step: int = 0
    since: float = 0.0
    """When it was first seen."""
    attempt: int = 0
    state: str
    """The rank's state: "slow", "recovered" or "moved"."""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class GuardTrippedEvent(JobEvent):
    """A guard tripped, and all ranks decided alike."""

    kind = EventKind.GUARD_TRIPPED
    merged = "trip"
    attempt: int
    trip: TripReport
    ledger: tuple[tuple[int, int], ...]
    """All skipped windows, as half-open ranges."""


@dataclass(frozen=True, kw_only=True)
class NodeHealthEvent(JobEvent):
    """The findings about a node; none: it is healthy."""

    kind = EventKind.NODE_HEALTH
    agent: str = ""
    node_id: str
    host: str
    findings: tuple[HealthFinding, ...]
    measured: Mapping[str, float] = field(default_factory=dict)
    """Device → GB/s of its memory."""


@dataclass(frozen=True, kw_only=True)
class NodeDrainingEvent(JobEvent):
    """The cluster is about to remove a node."""

    kind = EventKind.NODE_DRAINING
    agent: str
    node_id: str
    host: str
    ranks: tuple[int, ...] = ()
    deadline: float | None = None


@dataclass(frozen=True, kw_only=True)
class NodeQuarantinedEvent(JobEvent):
    """The service set a node aside, because of this job's incident."""

    kind = EventKind.NODE_QUARANTINED
    node: str
    reason: str
    until: float | None = None


@dataclass(frozen=True, kw_only=True)
class FaultInjectedEvent(JobEvent):
    """The job's supervisor accepted a fault that a user requested."""

    kind = EventKind.FAULT_INJECTED
    merged = "fault"
    omitted = frozenset(own.name for own in fields(Injection))
    number: int
    fault: Injection


@dataclass(frozen=True, kw_only=True)
class FaultFailedEvent(JobEvent):
    """An injected fault could not be carried out."""

    kind = EventKind.FAULT_FAILED
    agent: str
    why: str
