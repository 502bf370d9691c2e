"""The throughput of each mesh that the job has trained on, and the pause of a change, as measured.

Invariants: a mesh is measured only by steps of its own attempts; what is not measured is absent,
never zero. The newest attempt on a mesh replaces what earlier ones measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_workers.protocol.messages import StepRow

WARM_UP_STEPS = 3
"""The first steps of an attempt compile, allocate and fill caches: they are not measured."""
ENOUGH_STEPS = 5
WINDOW = 64  # number of newest steps whose median counts
ASSUMED_PAUSE_S = 10.0
"""The pause of a change of mesh before one was measured."""


@dataclass
class MeshSpeeds:
    """What the job has measured on its meshes."""

    tokens_per_s: Mapping[WorldShape, float] = field(default_factory=dict)
    tokens_per_step: int | None = None
    measured_pause_s: float | None = None
    """The shortest time between the last step on a mesh and the start of the first on another."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Tokens per second in the newest steps of the attempt."""
    attempt: int = 0
    first: int = 0
    last: int = 0
    last_at: float = 0.0
    shape: WorldShape | None = None

    @property
    def pause_s(self) -> float:
        measured = self.measured_pause_s
        return measured if measured is not None else ASSUMED_PAUSE_S

    def of_attempt(self, attempt: int) -> float | None:
        """What the attempt measured on its mesh; None if it has not run for long enough."""
        is_measured = attempt == self.attempt and len(self.recent) >= ENOUGH_STEPS
        return median(self.recent) if is_measured else None

    def add_rows(self, rows: Iterable[StepRow], shapes: Mapping[int, WorldShape]) -> None:
        """Add rows in ascending order; `shapes`: attempt → its shape. Known rows, and rows of older
        or unknown attempts, change nothing."""
        for row in rows:
            shape = shapes.get(row.attempt)
            if shape is None or row.attempt < self.attempt:
                continue
            if row.attempt > self.attempt:
                self._begin(row, shape)
            elif row.step <= self.last:
                continue
            self.last, self.last_at = row.step, row.at
            self.tokens_per_step = row.tokens
            if row.step - self.first >= WARM_UP_STEPS and row.step_time_s > 0 and row.tokens > 0:
                self._add(row.tokens / row.step_time_s, shape)

    def restore(self, facts: Facts, shapes: Mapping[int, WorldShape]) -> None:
        """Restore from the journal what earlier attempts measured."""
        self.tokens_per_s = {
            shapes[attempt]: speed for attempt, speed in facts.speeds.items() if attempt in shapes
        }

    def _begin(self, row: StepRow, shape: WorldShape) -> None:
        if self.shape is not None and shape != self.shape:
            pause_s = max(0.0, row.at - row.step_time_s - self.last_at)
            known = self.measured_pause_s
            self.measured_pause_s = pause_s if known is None else min(known, pause_s)
        self.attempt, self.shape, self.first = row.attempt, shape, row.step
        self.recent.clear()

    def _add(self, speed: float, shape: WorldShape) -> None:
        self.recent.append(speed)
        if len(self.recent) >= ENOUGH_STEPS:
            self.tokens_per_s = {**self.tokens_per_s, shape: median(self.recent)}
