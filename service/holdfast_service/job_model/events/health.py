"""Events of the health of ranks and nodes, of guards, and of injected faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from holdfast_service.diagnosis.hang_culprit import HangFinding, RankStack, Suspect
from holdfast_service.job_model.events.kinds import EventKind, JobEvent
from holdfast_workers.fault_injection.kinds import Injection
from holdfast_workers.protocol.findings import HealthFinding


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
    """slow, recovered or moved."""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class GuardTrip:
    """A step whose loss or gradients were out of bounds. A number is None if it was not finite, or
    is not known."""

    kind: str = ""
    """The value of a `holdfast_workers.training.guards.GuardKind`."""
    step: int = 0
    window: int = 0
    """The data window that the step read."""
    value: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    middle: float | None = None
    limit: float | None = None
    ranks: tuple[int, ...] = ()
    """The ranks on which it began."""
    layer: str | None = None
    what: str | None = None
    """output, gradient, loss or state."""
    micro_batch: int | None = None
    decision: str = ""
    """The value of a `holdfast_workers.training.guards.GuardAction`."""
    why: str = ""
    skipped: tuple[int, int] | None = None
    """The half-open range of windows that it adds to the ledger."""
    back_to: int | None = None
    """For a rollback: the last step that is kept."""


@dataclass(frozen=True, kw_only=True)
class GuardTrippedEvent(JobEvent):
    """A guard tripped, and all ranks decided alike."""

    kind = EventKind.GUARD_TRIPPED
    merged = "trip"
    attempt: int
    trip: GuardTrip
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
