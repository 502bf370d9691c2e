"""The record of one fault, from its first signal to the first new step. Immutable; pure.

An incident folds everything that goes wrong until the job runs again. Its event data holds all of
it each time, so the newest event of an incident is the whole incident.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast_service.policy import Cause, ErrorMark, Fault, primary

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
    next_attempt: int = 0
    joined_attempt: int = 0
    """The newest attempt whose ranks all joined: its steps belong to history."""
    decision: str = ""
    reason: str = ""
    restored_step: int | None = None
    steps_lost: int = 0
    tiers: Mapping[int, str] = field(default_factory=dict)
    phases_s: Mapping[str, float] = field(default_factory=dict)
    mark: ErrorMark | None = None
    bad: tuple[Mapping[str, Any], ...] = ()
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

    def spent(self, phase: str, seconds: float) -> Incident:
        """Adds to a phase: an incident that costs several attempts sums what each took."""
        before = self.phases_s.get(phase, 0.0)
        return replace(self, phases_s={**self.phases_s, phase: before + max(0.0, seconds)})

    def closed(self, now: float, resolution: str) -> Incident:
        done = replace(self, closed_at=now, resolution=resolution)
        return replace(done, phases_s={**self.phases_s, "total": max(0.0, now - self.signalled_at)})

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
            "restored_step": self.restored_step,
            "steps_lost": self.steps_lost,
            "tiers": {str(rank): tier for rank, tier in self.tiers.items()},
            "phases_s": {name: self.phases_s[name] for name in PHASES if name in self.phases_s},
            "failures": list(self.failures),
            "error": {"type": self.mark.type, "step": self.mark.step} if self.mark else None,
            "bad": [dict(one) for one in self.bad],
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
            next_attempt=data.get("next_attempt", 0),
            joined_attempt=data.get("joined_attempt", 0),
            decision=data["decision"],
            reason=data["reason"],
            restored_step=data["restored_step"],
            steps_lost=data["steps_lost"],
            tiers={int(rank): tier for rank, tier in data["tiers"].items()},
            phases_s=dict(data["phases_s"]),
            mark=ErrorMark(error["type"], error["step"]) if error else None,
            bad=tuple(data.get("bad", ())),
        )


def lost(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """What the faults took away, each thing once, in words the tables use."""
    found: list[dict[str, Any]] = []
    for fault in faults:
        if fault.cause is Cause.COMMUNICATION:
            continue  # survivors felt it; they are not lost
        one = {
            "cause": fault.cause.value,
            "rank": fault.rank,
            "ranks": list(fault.ranks) or ([] if fault.rank is None else [fault.rank]),
            "worker": fault.worker,
            "agent": fault.agent,
        }
        if one not in found:
            found.append(one)
    return found


def _fault(one: Mapping[str, Any], data: Mapping[str, Any]) -> Fault:
    return Fault(
        cause=Cause(one["cause"]),
        attempt=data["attempt"],
        at=data["opened_at"],
        what=data["evidence"][0] if data["evidence"] else "",
        rank=one.get("rank"),
        ranks=tuple(one.get("ranks", ())),
        worker=one.get("worker"),
        agent=one.get("agent"),
    )
