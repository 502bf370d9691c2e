"""The record of one incident, from its first signal to the first new step. Immutable; pure.

An incident collects all faults until the job runs again. Each of its events has the complete data,
so the newest event of an incident is the whole incident.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast_service.policy.causes import Cause, ErrorMark, Fault, Offence, primary_fault
from holdfast_service.policy.decision_ladder import Budget, Decision

PHASES = ("detect", "gather", "fence", "decide", "form", "restore", "first_step", "total")


@dataclass(frozen=True)
class Incident:
    """One incident. `attempt`: the attempt that failed first; `next_attempt`: the newest attempt
    announced since."""

    number: int
    cause: Cause
    attempt: int
    opened_at: float
    signalled_at: float
    faults: tuple[Fault, ...] = ()
    evidence: tuple[str, ...] = ()
    failures: tuple[float, ...] = ()
    """Times at which attempts failed because of this incident; the budget counts them."""
    preemptions: tuple[float, ...] = ()
    """Times at which attempts ended because a node was removed after a notice."""
    offences: tuple[Offence, ...] = ()
    """The nodes that were to blame."""
    next_attempt: int = 0
    joined_attempt: int = 0
    """The newest attempt that all ranks joined: its steps belong to history."""
    decision: str = ""
    reason: str = ""
    refused: tuple[Mapping[str, str], ...] = ()
    """Every other decision with the reason against it: {decision, why}."""
    budget: Mapping[str, float] = field(default_factory=dict)
    """The budget: used, allowed and left."""
    restored_step: int | None = None
    steps_lost: int = 0
    tiers: Mapping[int, str] = field(default_factory=dict)
    phases_s: Mapping[str, float] = field(default_factory=dict)
    mark: ErrorMark | None = None
    bad: tuple[Mapping[str, Any], ...] = ()
    suspects: tuple[Mapping[str, Any], ...] = ()
    """Of a hang: the suspected ranks, each with a score and reasons."""
    stacks: tuple[Mapping[str, Any], ...] = ()
    """Of a hang: the stacks of the ranks, once for all ranks with the same stack."""
    closed_at: float | None = None
    resolution: str = ""

    @classmethod
    def opened(cls, number: int, fault: Fault, now: float) -> Incident:
        detect = {"detect": max(0.0, now - fault.at)}
        return cls(
            number=number,
            cause=fault.cause,
            attempt=fault.attempt,
            opened_at=now,
            signalled_at=min(fault.at, now),
            faults=(fault,),
            evidence=(fault.what,),
            phases_s=detect,
        )

    def with_fault(self, fault: Fault) -> Incident:
        """A copy with a further fault."""
        faults = (*self.faults, fault)
        return replace(self, faults=faults, cause=primary_fault(faults).cause).with_evidence(
            fault.what
        )

    def has_lost_agent(self, agent: str) -> bool:
        return any(
            fault.agent == agent and fault.cause is Cause.AGENT_LOST for fault in self.faults
        )

    def with_node_lost(self, agent: str) -> Incident:
        """A copy in which the agent (see `has_lost_agent`) was lost together with its node."""
        faults = tuple(
            replace(fault, cause=Cause.NODE_LOST)
            if fault.agent == agent and fault.cause is Cause.AGENT_LOST
            else fault
            for fault in self.faults
        )
        return replace(self, faults=faults, cause=primary_fault(faults).cause)

    def with_evidence(self, what: str) -> Incident:
        if what in self.evidence:
            return self
        return replace(self, evidence=(*self.evidence, what))

    def with_decision(self, decision: Decision, budget: Budget) -> Incident:
        """A copy with the decision, and the budget at that time."""
        return replace(
            self,
            decision=decision.action.value,
            reason=decision.reason,
            refused=decision.refused_data(),
            budget=budget.data(),
        )

    def with_phase_time(self, phase: str, seconds: float) -> Incident:
        """A copy with `seconds` added to a phase: several attempts of one incident are summed."""
        before = self.phases_s.get(phase, 0.0)
        return replace(self, phases_s={**self.phases_s, phase: before + max(0.0, seconds)})

    def closed(self, now: float, resolution: str) -> Incident:
        total_s = max(0.0, now - self.signalled_at)
        phases_s = {**self.phases_s, "total": total_s}
        return replace(self, closed_at=now, resolution=resolution, phases_s=phases_s)

    def data(self) -> dict[str, Any]:
        """The event's data, as JSON."""
        return {
            "incident": self.number,
            "cause": self.cause.value,
            "causes": [
                cause.value for cause in Cause if cause in {fault.cause for fault in self.faults}
            ]
            or [self.cause.value],
            "attempt": self.attempt,
            "next_attempt": self.next_attempt,
            "joined_attempt": self.joined_attempt,
            "lost": _lost_items(self.faults),
            "evidence": list(self.evidence),
            "decision": self.decision,
            "reason": self.reason,
            "refused": [dict(alternative) for alternative in self.refused],
            "budget": dict(self.budget),
            "restored_step": self.restored_step,
            "steps_lost": self.steps_lost,
            "tiers": {str(rank): tier for rank, tier in self.tiers.items()},
            "phases_s": {name: self.phases_s[name] for name in PHASES if name in self.phases_s},
            "failures": list(self.failures),
            "preemptions": list(self.preemptions),
            "offences": [offence.data() for offence in self.offences],
            "error": dict(self.mark.__dict__) if self.mark else None,
            "bad": [dict(copy) for copy in self.bad],
            "suspects": [dict(suspect) for suspect in self.suspects],
            "stacks": [dict(stack) for stack in self.stacks],
            "signalled_at": self.signalled_at,
            "opened_at": self.opened_at,
            "closed_at": self.closed_at,
            "resolution": self.resolution,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Incident:
        """An open incident, as a previous supervisor stored it; its faults stay as evidence."""
        error = data.get("error")
        return cls(
            number=data["incident"],
            cause=Cause(data["cause"]),
            attempt=data["attempt"],
            opened_at=data["opened_at"],
            signalled_at=data.get("signalled_at", data["opened_at"]),
            faults=tuple(_fault(item, data) for item in data.get("lost", ())),
            evidence=tuple(data["evidence"]),
            failures=tuple(data.get("failures", ())),
            preemptions=tuple(data.get("preemptions", ())),
            offences=tuple(Offence.from_data(item) for item in data.get("offences", ())),
            next_attempt=data.get("next_attempt", 0),
            joined_attempt=data.get("joined_attempt", 0),
            decision=data["decision"],
            reason=data["reason"],
            refused=tuple(data.get("refused", ())),
            budget=dict(data.get("budget", {})),
            restored_step=data["restored_step"],
            steps_lost=data["steps_lost"],
            tiers={int(rank): tier for rank, tier in data["tiers"].items()},
            phases_s=dict(data["phases_s"]),
            mark=ErrorMark(**error) if error else None,
            bad=tuple(data.get("bad", ())),
            suspects=tuple(data.get("suspects", ())),
            stacks=tuple(data.get("stacks", ())),
        )


def _lost_items(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """The processes and nodes lost to the faults, each once, as the tables store them."""
    items: list[dict[str, Any]] = []
    for fault in faults:
        if fault.cause in (Cause.COMMUNICATION, Cause.REMOTE_UNAVAILABLE):
            continue  # the process that reported it is not lost
        item = {
            "cause": fault.cause.value,
            "rank": fault.rank,
            "ranks": list(fault.ranks) or ([] if fault.rank is None else [fault.rank]),
            "worker": fault.worker,
            "agent": fault.agent,
            "attempt": fault.attempt,
            "on_notice": fault.on_notice,
        }
        if item not in items:
            items.append(item)
    return items


def _fault(item: Mapping[str, Any], data: Mapping[str, Any]) -> Fault:
    return Fault(
        cause=Cause(item["cause"]),
        attempt=item.get("attempt", data["attempt"]),
        at=data["opened_at"],
        what=data["evidence"][0] if data["evidence"] else "",
        rank=item.get("rank"),
        ranks=tuple(item.get("ranks", ())),
        worker=item.get("worker"),
        agent=item.get("agent"),
        on_notice=item.get("on_notice", False),
    )
