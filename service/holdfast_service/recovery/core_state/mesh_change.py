"""When a world changes its size, and a planned change from its decision to the old world's end.

A world changes its size on a user's order at once, otherwise when it is worth the pause. A better
mesh must have had room for a while, and a node that comes and goes must not make the world follow
it: each resize within the window doubles the time that the next growth waits.

While the world trains on, the agents of the next world prepare processes for its ranks. Then all
ranks leave the world after one agreed step. A fault meanwhile ends the world like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.policy.causes import Fault, within_window

NODES_ARRIVE_S = 10.0
"""How long an ordered growth waits for the rest of its nodes after some have come."""


@dataclass
class Growth:
    """The mesh that the world may grow to, the resizes so far, and the size that is ordered."""

    wait_s: float
    window_s: float
    shape: WorldShape | None = None
    since: float = 0.0
    resizes: tuple[float, ...] = ()
    """When the world was resized, within the window."""
    limit: int | None = None
    """Most nodes that may train, as the job's user ordered; None: as many as the job may have."""
    is_held: bool = False
    """Other jobs wait for all nodes that it could take."""
    ordered: WorldShape | None = None
    """The larger mesh that the user ordered, until the world has it: it grows at once."""
    kept_seats: frozenset[str] | None = None
    """The seats that were last kept; None: all."""
    scheduled: WorldShape | None = None
    """The only shape that the next world may have, by the job's schedule; None: it has none."""

    @property
    def due_at(self) -> float | None:
        """When the world may grow; None if no better mesh has room."""
        if self.shape is None:
            return None
        if self.ordered is not None:  # its nodes come one after another
            return self.since + (0.0 if self.shape == self.ordered else NODES_ARRIVE_S)
        recent = within_window(self.resizes, self.since, self.window_s)
        factor = 2.0 ** max(0, len(recent) - 1)
        return self.since + min(self.wait_s * factor, self.window_s)

    def order(self, limit: int | None, shapes: Sequence[WorldShape], *, is_held: bool) -> None:
        """Take the order of the control plane."""
        before, self.limit, self.is_held = self.limit, limit, is_held
        if limit != before:
            is_more = before is not None and (limit is None or limit > before)
            self.ordered = self.allowed(shapes)[0] if is_more else None

    def allowed(self, shapes: Sequence[WorldShape]) -> Sequence[WorldShape]:
        """The shapes that may be used, best first: those as small as ordered, at least the
        smallest."""
        limit = self.limit
        if self.scheduled is not None:
            return [self.scheduled]
        if limit is None:
            return shapes
        return [shape for shape in shapes if shape.nodes <= limit] or shapes[-1:]

    def follow(self, scheduled: WorldShape | None) -> None:
        """The next world has the shape that is scheduled for its first step."""
        self.scheduled = scheduled

    def keep(self, seats: frozenset[str] | None) -> bool:
        """Record the seats that are kept. False if they are the same as before."""
        changed = seats != self.kept_seats
        self.kept_seats = seats
        return changed

    def offer(self, shape: WorldShape | None, now: float) -> None:
        """`shape` has room now; None: no better mesh has."""
        if shape != self.shape:
            self.shape, self.since = shape, now

    def record_resize(self, shape: WorldShape, now: float) -> None:
        """The world has another mesh, `shape`, from now on."""
        self.resizes = (*within_window(self.resizes, now, self.window_s), now)
        self.shape = None
        if shape == self.ordered:
            self.ordered = None


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
