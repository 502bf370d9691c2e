"""The incidents of the job, and the failures and blamed nodes that count against its budget.

Values only; `CoreState.emit_incident` makes events of incidents, and `recovery/nodes/situation.py`
decides which faults count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast_service.policy.causes import Cause, Fault, Offence, within_window
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
    """The incident closed last. Its record never changes again but for what may be known late:
    whether an agent was lost with its node, and which rank a repeated step accuses."""
    outage: Incident | None = None
    """The open incident of the remote tier; nothing waits for its end."""
    batch: tuple[Fault, ...] = ()
    """Faults gathered for the present incident."""
    decision: Decision | None = None
    """The decision made when the last attempt was condemned."""

    def new_incident(self, fault: Fault, now: float, level: int) -> Incident:
        """A new incident with a number of its own; it is not kept. `level`: of the job's program
        at present."""
        self.count += 1
        return Incident.opened(self.count, fault, now, level)

    def open(self, fault: Fault, now: float, level: int) -> None:
        """Open the incident of the job with its first fault."""
        self.current = self.new_incident(fault, now, level)

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

    def close(self, now: float, phase: str, resolution: str, end_code: str) -> Incident | None:
        """Close the open incident in `phase`. None if there is none."""
        if self.current is None:
            return None
        self.closed = self.current.closed(now, phase, resolution, end_code)
        self.current = None
        return self.closed

    def add_late_evidence(self, cause: Cause, evidence: str) -> Incident | None:
        """Add evidence to the incident closed last, if it has this cause. None if it has not."""
        if self.closed is None or self.closed.cause is not cause:
            return None
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

    def open_outage(self, fault: Fault, decision: str, now: float, level: int) -> Incident | None:
        """Open the incident of the remote tier. None if it is open already."""
        if self.outage is not None:
            return None
        opened = self.new_incident(fault, now, level)
        self.outage = replace(opened, decision=decision, reason=fault.what, steps_lost=0)
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

    def leave_out(self, newest: int) -> None:
        """The numbers up to `newest` are used."""
        self.count = max(self.count, newest)

    def restore(self, facts: Facts) -> None:
        """Restore the incidents from the journal, which may lack the newest numbers."""
        self.leave_out(facts.incidents)
        self.current, self.outage = facts.incident, facts.outage


@dataclass
class FailureBudget:
    """What was used of the budget within the window."""

    window_s: float
    failures: tuple[float, ...] = ()
    """When attempts were condemned; preemptions are counted separately."""
    preemptions: tuple[float, ...] = ()
    offences: tuple[Offence, ...] = ()
    """Nodes that were to blame within the window."""
    ignored: dict[tuple[str, str | None, int | None], float] = field(default_factory=dict)
    """(cause, agent, rank) of faults that were reported and ignored → when."""

    def count_failure(self, now: float) -> None:
        self.failures = (*within_window(self.failures, now, self.window_s), now)

    def count_preemption(self, now: float) -> None:
        self.preemptions = (*within_window(self.preemptions, now, self.window_s), now)

    def add_offences(self, offences: Iterable[Offence], now: float) -> None:
        self.offences = (*self.recent_offences(now), *offences)

    def withdraw_offences(self, before: tuple[Offence, ...]) -> None:
        """Return to the offences `before` those of a fault that is judged again."""
        self.offences = before

    def recent_offences(self, now: float) -> tuple[Offence, ...]:
        return tuple(offence for offence in self.offences if offence.at > now - self.window_s)

    def record_ignored(self, fault: Fault, now: float) -> bool:
        """Record an ignored fault. False if the same was already ignored within the window."""
        key = (fault.cause.value, fault.agent, fault.rank)
        before = self.ignored.get(key)
        if before is not None and now < before + self.window_s:
            return False
        self.ignored[key] = now
        return True

    def restore(self, facts: Facts) -> None:
        """Restore the budget from the journal."""
        self.failures, self.preemptions = facts.failures, facts.preemptions
        self.offences = facts.offences
