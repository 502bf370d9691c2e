"""The record of one incident, from its first signal to the first step of the next attempt.
Immutable; pure.

An incident collects all faults until the job runs again. Each of its events has the complete data,
so the newest event of an incident is the whole incident. Its phases follow one another without a
gap: they always add up to the total.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from holdfast_service.placement.restore_points import BadCopy
from holdfast_service.policy.causes import Cause, ErrorMark, Fault, Offence, primary_fault
from holdfast_service.policy.decision_ladder import Budget, Decision, RefusedAlternative
from holdfast_service.policy.incident_parts import EarlierRecovery, SharedStack, SuspectedRank

PHASES = ("detect", "gather", "fence", "decide", "form", "restore", "first_step", "outage", "total")
"""The phases of an incident. In `outage`, training goes on while the remote tier is away."""


@dataclass(frozen=True, kw_only=True)
class IncidentCourse:
    """The part of an incident that is stored as it is. A fact that is not known is None or empty,
    never 0: see `views/incident_facts.py` for what each sentence needs."""

    attempt: int = 0
    """The attempt that failed first."""
    next_attempt: int = 0
    """The newest attempt announced since."""
    joined_attempt: int = 0
    """The newest attempt that all ranks joined: its steps belong to history."""
    evidence: tuple[str, ...] = ()
    failures: tuple[float, ...] = ()
    """Times at which attempts failed because of this incident; the budget counts them."""
    preemptions: tuple[float, ...] = ()
    """Times at which attempts ended because a node was removed after a notice."""
    data_outages: tuple[float, ...] = ()
    """Times at which attempts ended only because the job's data did not come."""
    offences: tuple[Offence, ...] = ()
    """The nodes that were to blame."""
    decision: str = ""
    reason: str = ""
    earlier: tuple[EarlierRecovery, ...] = ()
    """The recoveries before this decision, in order."""
    level: int = 3
    """How much the job's program works with Holdfast: a `ProgramLevel`. It decides which facts can
    be known."""
    restored_step: int | None = None
    """The step that the next attempt went on from. A program tells it with its first step."""
    steps_lost: int | None = None
    """Steps that are computed again."""
    tiers: Mapping[int, str] = field(default_factory=dict)
    """Rank → the tier of the state that Holdfast restored, or offered to a program. A checkpoint of
    the program's own is not here."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Phase → seconds, for the phases in `PHASES`."""
    bad: tuple[BadCopy, ...] = ()
    suspects: tuple[SuspectedRank, ...] = ()
    """Filled for a hang only."""
    stacks: tuple[SharedStack, ...] = ()
    """Filled for a hang only."""
    closed_at: float | None = None
    resolution: str = ""
    end_code: str = ""
    """The code of the job's end, if the job ended with this incident."""

    @property
    def attempts_lost(self) -> int:
        """The number of attempts that it ended."""
        return len(self.failures) + len(self.preemptions) + len(self.data_outages)

    @property
    def course(self) -> dict[str, Any]:
        """The values of these fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(IncidentCourse)}


@dataclass(frozen=True, kw_only=True)
class Incident(IncidentCourse):
    """One incident."""

    number: int
    cause: Cause
    opened_at: float
    signalled_at: float
    faults: tuple[Fault, ...] = ()
    refused: tuple[RefusedAlternative, ...] = ()
    """Every other decision with the reason against it."""
    budget: Budget | None = None
    """The failure budget at the time of the decision; None: no decision yet."""
    mark: ErrorMark | None = None

    @classmethod
    def opened(cls, number: int, fault: Fault, now: float, level: int = 3) -> Incident:
        detect = {"detect": max(0.0, now - fault.at)}
        return cls(
            number=number,
            cause=fault.cause,
            attempt=fault.attempt,
            opened_at=now,
            signalled_at=min(fault.at, now),
            faults=(fault,),
            evidence=(fault.what,),
            level=level,
            phases_s=detect,
        )

    def with_fault(self, fault: Fault) -> Incident:
        """A copy with a further fault."""
        return self._with_faults((*self.faults, fault)).with_evidence(fault.what)

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
        return self._with_faults(faults)

    def with_evidence(self, what: str) -> Incident:
        if what in self.evidence:
            return self
        return replace(self, evidence=(*self.evidence, what))

    def with_decision(self, decision: Decision, budget: Budget) -> Incident:
        """A copy with the decision, and the budget at that time. The decision before it stays in
        `earlier` if an attempt was announced since; what that attempt restored is void."""
        earlier = self.earlier
        if self.decision and self.next_attempt > max(
            (each.next_attempt for each in earlier), default=0
        ):
            earlier = _followed_by(earlier, self._cut_short())
        return replace(
            self,
            decision=decision.action.value,
            reason=decision.reason,
            refused=decision.refused,
            budget=budget,
            earlier=earlier,
            restored_step=None,
            steps_lost=None,
            tiers={},
        )

    def with_phase(self, phase: str, until: float) -> Incident:
        """A copy in which the time from the end of the last phase to `until` belongs to `phase`.
        Several attempts of one incident are summed. A phase that takes no time is not there: that
        nobody measured it must not read as 0."""
        taken_s = until - self.signalled_at - sum(self.phases_s.values())
        if taken_s <= 0.0:
            return self
        return replace(
            self, phases_s={**self.phases_s, phase: self.phases_s.get(phase, 0.0) + taken_s}
        )

    def closed(self, now: float, phase: str, resolution: str, end_code: str = "") -> Incident:
        """A copy that ends now, in `phase`; `end_code`: of the job, if that ends too."""
        phases_s = dict(self.with_phase(phase, now).phases_s)
        phases_s["total"] = sum(phases_s.values())
        return replace(
            self,
            closed_at=now,
            resolution=resolution,
            phases_s=phases_s,
            end_code=end_code,
            steps_lost=None if end_code else self.steps_lost,  # none is computed again
        )

    def _with_faults(self, faults: tuple[Fault, ...]) -> Incident:
        """A copy with these faults. The root cause is that of the attempt that failed first: a
        fault of a later attempt is one of the `causes`, and does not replace it."""
        first = [fault for fault in faults if fault.attempt <= self.attempt] or faults
        return replace(self, faults=faults, cause=primary_fault(first).cause)

    def _cut_short(self) -> EarlierRecovery:
        """The present decision, which a further fault has ended."""
        failed = max((each.next_attempt for each in self.earlier), default=self.attempt)
        of_attempt = [fault for fault in self.faults if fault.attempt == failed]
        return EarlierRecovery(
            attempt=failed,
            cause=(primary_fault(of_attempt).cause if of_attempt else self.cause).value,
            decision=self.decision,
            reason=self.reason,
            next_attempt=self.next_attempt,
        )


def _followed_by(
    earlier: tuple[EarlierRecovery, ...], cut_short: EarlierRecovery
) -> tuple[EarlierRecovery, ...]:
    """Attempts that fail for want of data, hundreds in an outage, are one entry."""
    if earlier and cut_short.cause == Cause.DATA_UNAVAILABLE:
        together = replace(earlier[-1], next_attempt=cut_short.next_attempt)
        if together == replace(cut_short, attempt=together.attempt):
            return (*earlier[:-1], together)
    return (*earlier, cut_short)
