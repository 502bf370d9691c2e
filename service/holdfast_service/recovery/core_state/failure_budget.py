"""The failures that count against the budget, and the nodes that were to blame.

Values only; `recovery/nodes/situation.py` decides which faults count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast_service.policy.causes import Fault, Offence, within_window
from holdfast_service.recovery.core_state.event_replay import Facts


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
