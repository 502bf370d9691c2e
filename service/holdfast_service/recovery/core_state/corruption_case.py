"""The open case of silent corruption: replicas differed, and the wrong rank is not known yet.

Invariant: every finding is judged once, whatever the number of ranks that report it.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_service.diagnosis.silent_corruption import CorruptionVerdict, Evidence


@dataclass
class CorruptionCase:
    """Evidence that named no rank, and the agents kept without ranks because of it."""

    judged_attempts: frozenset[int] = frozenset()
    """Attempts that ended because replicas differed in them."""
    unexplained: Evidence | None = None
    """Replicas differed and no rank could be named: the step is computed again."""
    refereed_rank: int | None = None
    """The rank whose part another node computes, to decide between two differing replicas."""
    sidelined: frozenset[str] = frozenset()
    """Agents that host no rank until the referee has decided."""
    passed: tuple[int, float] | None = None
    """(attempt, when): the attempt was first known to be past the repeated step then."""

    @property
    def repeated_step(self) -> int | None:
        """The step that the ranks compute again."""
        return self.unexplained.finding.step if self.unexplained is not None else None

    def begin(self, attempt: int) -> bool:
        """Judge the finding of this attempt now. False if it is judged already."""
        is_news = attempt not in self.judged_attempts
        self.judged_attempts |= {attempt}
        return is_news

    def record_verdict(self, verdict: CorruptionVerdict, evidence: Evidence) -> None:
        """Keep the case open if the verdict names no rank; another node may have to be referee."""
        self.unexplained = None if verdict.ranks else evidence
        self.refereed_rank = verdict.referee
        suspects = () if verdict.referee is None else (evidence.seats[verdict.referee].agent,)
        self.sidelined = frozenset(suspects)

    def is_outcome_lost(self, attempt: int, step: int, now: float, wait_s: float) -> bool:
        """Whether `step`, committed by `attempt`, is later than the repeated step, and `wait_s`
        have passed since this was first known."""
        repeated = self.repeated_step
        if repeated is None or step <= repeated:
            return False
        if self.passed is None or self.passed[0] != attempt:
            self.passed = (attempt, now)
            return False
        return now >= self.passed[1] + wait_s

    def close(self) -> None:
        """End the recheck of the step; no agent is sidelined for it any longer."""
        self.unexplained, self.refereed_rank, self.sidelined = None, None, frozenset()
