"""Events of incidents. Each has the complete incident, so the newest one is the whole incident."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Self

from pydantic import BeforeValidator, PlainSerializer

from holdfast_service.job_model.events.kinds import EventKind, JobEvent
from holdfast_service.placement.restore_points import BadCopy
from holdfast_service.policy.causes import Cause, ErrorMark, Fault, Offence
from holdfast_service.policy.decision_ladder import Action, Budget, RefusedAlternative
from holdfast_service.policy.incidents import PHASES, Incident, SharedStack, SuspectedRank


@dataclass(frozen=True, kw_only=True)
class LostItem:
    """A process or node that was lost to a fault. `cause`: see `IncidentRecord`."""

    cause: str = ""
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    worker: str | None = None
    agent: str | None = None
    attempt: int | None = None
    on_notice: bool = False
    """Whether the cluster had announced that it would remove the node."""


@dataclass(frozen=True, kw_only=True)
class RefusedDecision:
    """A decision that was not taken, and the reason."""

    decision: str
    why: str


def _budget_json(budget: Budget | None) -> dict[str, float]:
    return {} if budget is None else {**budget.__dict__, "failures_left": budget.failures_left}


OptionalBudget = Annotated[
    Budget | None, BeforeValidator(lambda given: given or None), PlainSerializer(_budget_json)
]
"""A budget; JSON shows none as `{}`, and one with `failures_left` added."""


@dataclass(frozen=True, kw_only=True)
class IncidentRecord:
    """An incident as it is stored. `cause` is the value of a `policy.causes.Cause`, as text: a
    newer supervisor may know further causes."""

    incident: int
    """Its number in the job."""
    cause: str = "unknown"
    """The root cause among `causes`."""
    causes: tuple[str, ...] = ()
    attempt: int = 0
    """The attempt that failed first."""
    next_attempt: int = 0
    joined_attempt: int = 0
    lost: tuple[LostItem, ...] = ()
    evidence: tuple[str, ...] = ()
    decision: str | None = None
    reason: str | None = None
    refused: tuple[RefusedDecision, ...] = ()
    budget: OptionalBudget = None
    """The failure budget at the time of the decision."""
    restored_step: int | None = None
    steps_lost: int | None = None
    tiers: Mapping[int, str] = field(default_factory=dict)
    """Rank → the tier of its restored state."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Phase → seconds, for the phases in `policy.incidents.PHASES`."""
    failures: tuple[float, ...] = ()
    preemptions: tuple[float, ...] = ()
    offences: tuple[Offence, ...] = ()
    error: ErrorMark | None = None
    bad: tuple[BadCopy, ...] = ()
    suspects: tuple[SuspectedRank, ...] = ()
    stacks: tuple[SharedStack, ...] = ()
    signalled_at: float | None = None
    opened_at: float | None = None
    closed_at: float | None = None
    resolution: str | None = None

    @classmethod
    def of(cls, incident: Incident) -> IncidentRecord:
        causes = {fault.cause for fault in incident.faults} or {incident.cause}
        return cls(
            incident=incident.number,
            cause=incident.cause.value,
            causes=tuple(cause.value for cause in Cause if cause in causes),
            attempt=incident.attempt,
            next_attempt=incident.next_attempt,
            joined_attempt=incident.joined_attempt,
            lost=_lost_items(incident.faults),
            evidence=incident.evidence,
            decision=incident.decision,
            reason=incident.reason,
            refused=tuple(
                RefusedDecision(decision=refused.action.value, why=refused.why)
                for refused in incident.refused
            ),
            budget=incident.budget,
            restored_step=incident.restored_step,
            steps_lost=incident.steps_lost,
            tiers=incident.tiers,
            phases_s={
                name: incident.phases_s[name] for name in PHASES if name in incident.phases_s
            },
            failures=incident.failures,
            preemptions=incident.preemptions,
            offences=incident.offences,
            error=incident.mark,
            bad=incident.bad,
            suspects=incident.suspects,
            stacks=incident.stacks,
            signalled_at=incident.signalled_at,
            opened_at=incident.opened_at,
            closed_at=incident.closed_at,
            resolution=incident.resolution,
        )

    def restored(self) -> Incident:
        """An open incident, as a previous supervisor stored it; its faults stay as evidence.

        Raises ValueError for a cause or a decision that this version does not know.
        """
        opened_at = self.opened_at or 0.0
        return Incident(
            number=self.incident,
            cause=Cause(self.cause),
            attempt=self.attempt,
            opened_at=opened_at,
            signalled_at=self.signalled_at or opened_at,
            faults=tuple(self._fault(item) for item in self.lost),
            evidence=self.evidence,
            failures=self.failures,
            preemptions=self.preemptions,
            offences=self.offences,
            next_attempt=self.next_attempt,
            joined_attempt=self.joined_attempt,
            decision=self.decision or "",
            reason=self.reason or "",
            refused=tuple(
                RefusedAlternative(Action(refused.decision), refused.why)
                for refused in self.refused
            ),
            budget=self.budget,
            restored_step=self.restored_step,
            steps_lost=self.steps_lost or 0,
            tiers=self.tiers,
            phases_s=self.phases_s,
            mark=self.error,
            bad=self.bad,
            suspects=self.suspects,
            stacks=self.stacks,
        )

    def _fault(self, item: LostItem) -> Fault:
        return Fault(
            cause=Cause(item.cause),
            attempt=self.attempt if item.attempt is None else item.attempt,
            at=self.opened_at or 0.0,
            what=self.evidence[0] if self.evidence else "",
            rank=item.rank,
            ranks=item.ranks,
            worker=item.worker,
            agent=item.agent,
            on_notice=item.on_notice,
        )


@dataclass(frozen=True, kw_only=True)
class IncidentEvent(JobEvent):
    """The base of the events of an incident."""

    merged = "record"
    record: IncidentRecord

    @classmethod
    def of(cls, incident: Incident) -> Self:
        return cls(record=IncidentRecord.of(incident))


@dataclass(frozen=True, kw_only=True)
class IncidentOpenedEvent(IncidentEvent):
    """A fault was seen."""

    kind = EventKind.INCIDENT_OPENED


@dataclass(frozen=True, kw_only=True)
class IncidentUpdatedEvent(IncidentEvent):
    """More is known about an incident, which may already be closed."""

    kind = EventKind.INCIDENT_UPDATED


@dataclass(frozen=True, kw_only=True)
class IncidentClosedEvent(IncidentEvent):
    """The job runs again, or has ended."""

    kind = EventKind.INCIDENT_CLOSED


def _lost_items(faults: Sequence[Fault]) -> tuple[LostItem, ...]:
    """The processes and nodes lost to the faults, each once."""
    items = (
        LostItem(
            cause=fault.cause.value,
            rank=fault.rank,
            ranks=fault.ranks or (() if fault.rank is None else (fault.rank,)),
            worker=fault.worker,
            agent=fault.agent,
            attempt=fault.attempt,
            on_notice=fault.on_notice,
        )
        for fault in faults
        # The process that reported one of these is not lost.
        if fault.cause not in (Cause.COMMUNICATION, Cause.REMOTE_UNAVAILABLE)
    )
    return tuple(dict.fromkeys(items))
