"""Events of incidents. Each has the complete incident, so the newest one is the whole incident."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

from pydantic import BeforeValidator, PlainSerializer

from holdfast_service.job_model.events.kinds import EventKind, JobEvent
from holdfast_service.policy.causes import Cause, ErrorMark, Fault
from holdfast_service.policy.decision_ladder import Action, Budget, RefusedAlternative
from holdfast_service.policy.incident_parts import LostItem, RefusedDecision
from holdfast_service.policy.incidents import PHASES, Incident, IncidentCourse


def _budget_json(budget: Budget | None) -> dict[str, float]:
    return {} if budget is None else {**budget.__dict__, "failures_left": budget.failures_left}


OptionalBudget = Annotated[
    Budget | None, BeforeValidator(lambda given: given or None), PlainSerializer(_budget_json)
]
"""A budget; JSON shows none as `{}`, and one with `failures_left` added."""


@dataclass(frozen=True, kw_only=True)
class IncidentRecord(IncidentCourse):
    """An incident as it is stored. `cause` is the value of a `policy.causes.Cause`, as text: a
    newer supervisor may know further causes."""

    incident: int
    """Its number in the job."""
    cause: str = "unknown"
    """The root cause among `causes`."""
    causes: tuple[str, ...] = ()
    lost: tuple[LostItem, ...] = ()
    refused: tuple[RefusedDecision, ...] = ()
    budget: OptionalBudget = None
    """The failure budget at the time of the decision."""
    error: ErrorMark | None = None
    signalled_at: float | None = None
    opened_at: float | None = None

    @classmethod
    def of(cls, incident: Incident) -> IncidentRecord:
        causes = {fault.cause for fault in incident.faults} or {incident.cause}
        phases_s = {name: incident.phases_s[name] for name in PHASES if name in incident.phases_s}
        return cls(
            **{**incident.course, "phases_s": phases_s},
            incident=incident.number,
            cause=incident.cause.value,
            causes=tuple(cause.value for cause in Cause if cause in causes),
            lost=_lost_items(incident.faults),
            refused=tuple(
                RefusedDecision(decision=refused.action.value, why=refused.why)
                for refused in incident.refused
            ),
            budget=incident.budget,
            error=incident.mark,
            signalled_at=incident.signalled_at,
            opened_at=incident.opened_at,
        )

    def restored(self) -> Incident:
        """An open incident, as a previous supervisor stored it; its faults stay as evidence.

        Raises ValueError for a cause or a decision that this version does not know.
        """
        opened_at = self.opened_at or 0.0
        return Incident(
            **self.course,
            number=self.incident,
            cause=Cause(self.cause),
            opened_at=opened_at,
            signalled_at=self.signalled_at or opened_at,
            faults=tuple(self._fault(item) for item in self.lost),
            refused=tuple(
                RefusedAlternative(Action(refused.decision), refused.why)
                for refused in self.refused
            ),
            budget=self.budget,
            mark=self.error,
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


def with_late_evidence(closed: IncidentRecord, later: IncidentRecord) -> IncidentRecord | None:
    """A closed incident with what a later report of it adds. None: the report is of another fault.

    What is known of an incident when it closes does not change. Two things may be known later:
    that an agent was lost with its node, and a sentence of evidence, as which rank a repeated step
    accuses.
    """
    if _identity(later) != _identity(closed) or len(later.lost) != len(closed.lost):
        return None
    if not all(map(_is_same_loss, closed.lost, later.lost)):
        return None
    was_node_lost = (closed.cause, later.cause) == (Cause.AGENT_LOST, Cause.NODE_LOST)
    return replace(
        closed,
        cause=later.cause if was_node_lost else closed.cause,
        causes=later.causes,
        lost=later.lost,
        evidence=(
            *closed.evidence,
            *(item for item in later.evidence if item not in closed.evidence),
        ),
    )


def _identity(record: IncidentRecord) -> tuple[object, ...]:
    """What every report of one incident agrees on, once it is closed."""
    times = (record.opened_at, record.failures, record.preemptions, record.data_outages)
    return (record.incident, record.attempt, record.next_attempt, *times)


def _is_same_loss(before: LostItem, after: LostItem) -> bool:
    """Whether both are one loss; that of an agent may turn out to be that of its node."""
    if before.cause == Cause.AGENT_LOST and after.cause == Cause.NODE_LOST:
        before = replace(before, cause=after.cause)
    return before == after


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
    """The processes and nodes lost to the faults, each once; a rank that waited for data again and
    again, in its first such attempt."""
    items = [
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
    ]
    found: dict[LostItem, LostItem] = {}
    for item in items:
        waited = item.cause == Cause.DATA_UNAVAILABLE
        found.setdefault(replace(item, attempt=None) if waited else item, item)
    return tuple(found.values())
