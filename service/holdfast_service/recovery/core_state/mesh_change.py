"""A planned change of the mesh, from its decision to the end of the old world.

While the world trains on, the agents of the next world prepare processes for its ranks. Then all
ranks leave the world after one agreed step. A fault meanwhile ends the world like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_service.policy.causes import Fault


@dataclass
class MeshChange:
    """The change under way; `attempt` 0: none."""

    attempt: int = 0
    """The attempt that ends for it."""
    reason: str = ""
    preparing: frozenset[str] = frozenset()
    """Agents that have not answered that they are prepared."""
    leaving: bool = False
    """Whether the ranks were ordered to leave."""
    deadline: float = 0.0
    """The end of the preparation, or of the wait for the ranks to leave."""

    def begin(self, attempt: int, reason: str, agents: frozenset[str], deadline: float) -> None:
        """The world of `attempt` is to end for another mesh, for which `agents` prepare."""
        self.attempt, self.reason = attempt, reason
        self.preparing, self.leaving, self.deadline = agents, False, deadline

    def is_under_way(self, attempt: int) -> bool:
        """Whether the world of `attempt` ends for a planned change."""
        return self.attempt == attempt

    def record_prepared(self, agent: str) -> None:
        """The agent is prepared, or cannot be: nothing waits for it any more."""
        self.preparing -= {agent}

    def leave(self, deadline: float) -> None:
        """The ranks were ordered to leave."""
        self.leaving, self.deadline = True, deadline

    def drop(self) -> None:
        """The reason for the change is gone."""
        self.attempt, self.leaving = 0, False


@dataclass
class Departure:
    """The ranks of a program that were asked to save and to leave, because a node must be left;
    `attempt` 0: none."""

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
