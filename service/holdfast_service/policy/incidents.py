"""The record of one fault, from its first signal to the first new step. Immutable; pure.

An incident folds everything that goes wrong until the job runs again. Its event data holds all of
it each time, so the newest event of an incident is the whole incident.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast_service.policy.causes import Cause, ErrorMark, Fault, Offence, primary
from holdfast_service.policy.decision_ladder import Budget, Decision

PHASES = ("detect", "gather", "fence", "decide", "form", "restore", "first_step", "total")


@dataclass(frozen=True)
class Incident:
    """`attempt` is the one that failed first; `next_attempt` the newest announced since."""

    number: int
    cause: Cause
    attempt: int
    opened_at: float
    signalled_at: float
    faults: tuple[Fault, ...] = ()
    evidence: tuple[str, ...] = ()
    failures: tuple[float, ...] = ()
    """When each attempt that this incident cost was condemned: what the budget counts."""
    preemptions: tuple[float, ...] = ()
    """The same of attempts that ended because something was taken away, on notice."""
    offences: tuple[Offence, ...] = ()
    """Nodes that were to blame."""
    next_attempt: int = 0
    joined_attempt: int = 0
    """The newest attempt whose ranks all joined: its steps belong to history."""
    decision: str = ""
    reason: str = ""
    refused: tuple[Mapping[str, str], ...] = ()
    """Every other decision, and why it was not taken: {decision, why}."""
    budget: Mapping[str, float] = field(default_factory=dict)
    """What was used of what is allowed, and what is left."""
    restored_step: int | None = None
    steps_lost: int = 0
    tiers: Mapping[int, str] = field(default_factory=dict)
    phases_s: Mapping[str, float] = field(default_factory=dict)
    mark: ErrorMark | None = None
    bad: tuple[Mapping[str, Any], ...] = ()
    suspects: tuple[Mapping[str, Any], ...] = ()
    """Of a hang: ranks, with how much speaks against each, and what."""
    stacks: tuple[Mapping[str, Any], ...] = ()
    """Of a hang: where the ranks stood, told once for those that stood alike."""
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
        """The same incident, with one more cause folded in."""
        faults = (*self.faults, fault)
        return replace(self, faults=faults, cause=primary(faults).cause).with_evidence(fault.what)

    def has_lost_agent(self, agent: str) -> bool:
        return any(one.agent == agent and one.cause is Cause.AGENT_LOST for one in self.faults)

    def with_node_lost(self, agent: str) -> Incident:
        """The same incident, now that the agent (see `has_lost_agent`) is known to have been lost
        with its node."""
        faults = tuple(
            replace(fault, cause=Cause.NODE_LOST)
            if fault.agent == agent and fault.cause is Cause.AGENT_LOST
            else fault
            for fault in self.faults
        )
        return replace(self, faults=faults, cause=primary(faults).cause)

    def with_evidence(self, what: str) -> Incident:
        if what in self.evidence:
            return self
        return replace(self, evidence=(*self.evidence, what))

    def decided(self, decision: Decision, budget: Budget) -> Incident:
        """The same incident, with what is done about it, and what is left to be spent."""
        return replace(
            self,
            decision=decision.action.value,
            reason=decision.reason,
            refused=tuple(one.data() for one in decision.refused),
            budget=budget.data(),
        )

    def spent(self, phase: str, seconds: float) -> Incident:
        """Adds to a phase: an incident that costs several attempts sums what each took."""
        before = self.phases_s.get(phase, 0.0)
        return replace(self, phases_s={**self.phases_s, phase: before + max(0.0, seconds)})

    def closed(self, now: float, resolution: str) -> Incident:
        total_s = max(0.0, now - self.signalled_at)
        phases_s = {**self.phases_s, "total": total_s}
        return replace(self, closed_at=now, resolution=resolution, phases_s=phases_s)

    def data(self) -> dict[str, Any]:
        """The event's data: JSON throughout."""
        return {
            "incident": self.number,
            "cause": self.cause.value,
            "causes": [cause.value for cause in Cause if cause in {f.cause for f in self.faults}]
            or [self.cause.value],
            "attempt": self.attempt,
            "next_attempt": self.next_attempt,
            "joined_attempt": self.joined_attempt,
            "lost": lost(self.faults),
            "evidence": list(self.evidence),
            "decision": self.decision,
            "reason": self.reason,
            "refused": [dict(one) for one in self.refused],
            "budget": dict(self.budget),
            "restored_step": self.restored_step,
            "steps_lost": self.steps_lost,
            "tiers": {str(rank): tier for rank, tier in self.tiers.items()},
            "phases_s": {name: self.phases_s[name] for name in PHASES if name in self.phases_s},
            "failures": list(self.failures),
            "preemptions": list(self.preemptions),
            "offences": [one.data() for one in self.offences],
            "error": dict(self.mark.__dict__) if self.mark else None,
            "bad": [dict(one) for one in self.bad],
            "suspects": [dict(one) for one in self.suspects],
            "stacks": [dict(one) for one in self.stacks],
            "signalled_at": self.signalled_at,
            "opened_at": self.opened_at,
            "closed_at": self.closed_at,
            "resolution": self.resolution,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Incident:
        """An open incident as a former supervisor left it; its faults stay as evidence."""
        error = data.get("error")
        return cls(
            number=data["incident"],
            cause=Cause(data["cause"]),
            attempt=data["attempt"],
            opened_at=data["opened_at"],
            signalled_at=data.get("signalled_at", data["opened_at"]),
            faults=tuple(_fault(one, data) for one in data.get("lost", ())),
            evidence=tuple(data["evidence"]),
            failures=tuple(data.get("failures", ())),
            preemptions=tuple(data.get("preemptions", ())),
            offences=tuple(Offence.from_data(one) for one in data.get("offences", ())),
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


def lost(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """What the faults took away, each thing once, in words the tables use."""
    found: list[dict[str, Any]] = []
    for fault in faults:
        if fault.cause in (Cause.COMMUNICATION, Cause.REMOTE_UNAVAILABLE):
            continue  # who tells of it is not lost
        one = {
            "cause": fault.cause.value,
            "rank": fault.rank,
            "ranks": list(fault.ranks) or ([] if fault.rank is None else [fault.rank]),
            "worker": fault.worker,
            "agent": fault.agent,
            "attempt": fault.attempt,
            "on_notice": fault.on_notice,
        }
        if one not in found:
            found.append(one)
    return found


def _fault(one: Mapping[str, Any], data: Mapping[str, Any]) -> Fault:
    return Fault(
        cause=Cause(one["cause"]),
        attempt=one.get("attempt", data["attempt"]),
        at=data["opened_at"],
        what=data["evidence"][0] if data["evidence"] else "",
        rank=one.get("rank"),
        ranks=tuple(one.get("ranks", ())),
        worker=one.get("worker"),
        agent=one.get("agent"),
        on_notice=one.get("on_notice", False),
    )
