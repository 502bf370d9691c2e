"""The ranks of a program that were asked to save and to leave, because a node must be left."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_service.policy.causes import Fault


@dataclass
class Departure:
    """The departure under way; `attempt` 0: none."""

    attempt: int = 0
    """The attempt that its ranks leave."""
    deadline: float = 0.0
    """How long they are waited for."""
    fault: Fault | None = None
    """Why."""

    def begin(self, attempt: int, fault: Fault, deadline: float) -> None:
        """The ranks of `attempt` were asked to leave."""
        self.attempt, self.fault, self.deadline = attempt, fault, deadline

    def is_of(self, attempt: int) -> bool:
        """Whether the ranks of `attempt` were asked to leave."""
        return self.fault is not None and self.attempt == attempt

    def end(self) -> None:
        """The ranks are waited for no more."""
        self.attempt, self.fault = 0, None

    def due_at(self, attempt: int) -> float | None:
        """The time until which the ranks are waited for; None if they were not asked."""
        return self.deadline if self.is_of(attempt) else None
