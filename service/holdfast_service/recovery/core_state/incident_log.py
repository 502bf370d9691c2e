"""The incidents of the job: the open one with its gathered faults, the last closed one, an outage.

The log only keeps records; `CoreState.emit_incident` makes events of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from holdfast_service.policy.causes import Fault
from holdfast_service.policy.decision_ladder import Budget, Decision
from holdfast_service.policy.incidents import Incident
from holdfast_service.recovery.core_state.event_replay import Facts


@dataclass
class IncidentLog:
    """The incidents of a job: at most one is open, and beside it at most one of the remote tier."""

    count: int = 0
    """The number of the newest incident."""
    current: Incident | None = None
    """The open incident."""
    closed: Incident | None = None
    """The incident closed last: a late report on its cause may amend its record."""
    outage: Incident | None = None
    """The open incident of the remote tier; nothing waits for its end."""
    batch: tuple[Fault, ...] = ()
    """Faults gathered for the present incident."""
    decision: Decision | None = None
    """The decision made when the last attempt was condemned."""

    def new_incident(self, fault: Fault, now: float) -> Incident:
        """A new incident with a number of its own; it is not kept."""
        self.count += 1
        return Incident.opened(self.count, fault, now)

    def open(self, fault: Fault, now: float) -> None:
        """Open the incident of the job with its first fault."""
        self.current = self.new_incident(fault, now)

    def add_fault(self, fault: Fault) -> bool:
        """Add a fault to the open incident. False if it contains the fault already."""
        if self.current is None or fault in self.current.faults:
            return False
        self.current = self.current.with_fault(fault)
        return True

    def amend(self, **changes: Any) -> None:
        """Change fields of the open incident, if there is one."""
        if self.current is not None:
            self.current = replace(self.current, **changes)

    def add_evidence(self, evidence: str) -> bool:
        """Add a sentence to the evidence of the open incident. False if nothing changed."""
        if self.current is None or evidence in self.current.evidence:
            return False
        self.current = self.current.with_evidence(evidence)
        return True

    def end_phase(self, phase: str, now: float) -> None:
        """The time since the end of the last phase belongs to `phase`."""
        if self.current is not None:
            self.current = self.current.with_phase(phase, now)

    def close(self, now: float, phase: str, resolution: str) -> Incident | None:
        """Close the open incident in `phase`; it may still be amended. None if there is none."""
        if self.current is None:
            return None
        self.closed, self.current = self.current.closed(now, phase, resolution), None
        return self.closed

    def amend_closed(self, evidence: str) -> Incident | None:
        """Add evidence to the incident closed last. None if there is none."""
        if self.closed is not None:
            self.closed = self.closed.with_evidence(evidence)
        return self.closed

    def amend_node_status(self, agent: str, evidence: str, *, lost: bool) -> Incident | None:
        """Record whether the agent was lost together with its node, in the incident of its loss.
        None if no known incident is about that loss."""
        for incident in (self.current, self.closed):
            if incident is None or not incident.has_lost_agent(agent):
                continue
            amended = incident.with_node_lost(agent) if lost else incident
            amended = amended.with_evidence(evidence)
            if incident is self.current:
                self.current = amended
            else:
                self.closed = amended
            return amended
        return None

    def open_outage(self, fault: Fault, decision: str, now: float) -> Incident | None:
        """Open the incident of the remote tier. None if it is open already."""
        if self.outage is not None:
            return None
        opened = self.new_incident(fault, now)
        self.outage = replace(opened, decision=decision, reason=fault.what)
        return self.outage

    def close_outage(self, now: float, resolution: str) -> Incident | None:
        """Close the incident of the remote tier. None if there is none."""
        if self.outage is None:
            return None
        closed, self.outage = self.outage.closed(now, "outage", resolution), None
        return closed

    def gather(self, fault: Fault) -> None:
        """Keep a fault until the batch is judged."""
        self.batch = (*self.batch, fault)

    def forget_batch(self) -> None:
        self.batch = ()

    def record_decision(self, decision: Decision, budget: Budget) -> None:
        """Record a decision and the budget that it was based on in the open incident."""
        if self.current is not None:
            self.current = self.current.with_decision(decision, budget)

    def carry_out(self, decision: Decision) -> None:
        """Keep the decision that the next attempt carries out."""
        self.decision = decision

    def restore(self, facts: Facts) -> None:
        """Restore the incidents from the journal."""
        self.count, self.current, self.outage = facts.incidents, facts.incident, facts.outage
