"""When a world grows: a better mesh must have had room for a while.

The pause of a resize must be worth it, and a node that comes and goes must not make the world
follow it: each resize within the window doubles the time that the next growth waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.policy.causes import within_window


@dataclass
class Growth:
    """The mesh that the world may grow to, and the resizes so far."""

    wait_s: float
    window_s: float
    shape: WorldShape | None = None
    since: float = 0.0
    resizes: tuple[float, ...] = ()
    """When the world was resized, within the window."""

    @property
    def due_at(self) -> float | None:
        """When the world may grow; None if no better mesh has room."""
        if self.shape is None:
            return None
        recent = within_window(self.resizes, self.since, self.window_s)
        factor = 2.0 ** max(0, len(recent) - 1)
        return self.since + min(self.wait_s * factor, self.window_s)

    def offer(self, shape: WorldShape | None, now: float) -> None:
        """`shape` has room now; None: no better mesh has."""
        if shape != self.shape:
            self.shape, self.since = shape, now

    def record_resize(self, now: float) -> None:
        """The world has another mesh from now on."""
        self.resizes = (*within_window(self.resizes, now, self.window_s), now)
        self.shape = None
