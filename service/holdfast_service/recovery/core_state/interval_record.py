"""The save intervals of the job, and the measurements from which they are chosen.

Values only; `recovery/upkeep/save_intervals.py` decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from holdfast_service.policy.checkpoint_intervals import (
    AutoTier,
    IntervalChoice,
    SaveCosts,
    needed_remote_tier,
)
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_workers.protocol.messages import StepRow, Tier


@dataclass
class SaveIntervals:
    """Steps between two saves, per tier, with their costs and the number of restores."""

    steps: Mapping[AutoTier, int]
    measured: frozenset[AutoTier] = frozenset()
    """Tiers whose interval already follows measured costs."""
    costs: SaveCosts = field(default_factory=SaveCosts)
    restores: int = 0
    """Number of incidents that restored a saved state."""
    remote_restores: int = 0
    """Number of those incidents that needed the remote tier."""

    def add_rows(self, rows: Iterable[StepRow]) -> None:
        """Measure the cost of saves in these steps."""
        self.costs.add_rows(rows)

    def measure_again(self) -> None:
        """Forget the measured costs."""
        self.costs = SaveCosts()

    def apply(self, choice: IntervalChoice) -> int:
        """Change the interval of a tier; returns the interval before."""
        before = self.steps[choice.tier]
        self.measured |= {choice.tier}
        self.steps = {**self.steps, choice.tier: choice.every_steps}
        return before

    def count_restore(self, tiers: Iterable[Tier]) -> None:
        """Count an incident whose recovery restored state from these tiers."""
        self.restores += 1
        self.remote_restores += needed_remote_tier(tiers)

    def restore(self, facts: Facts) -> None:
        """Restore the intervals from the journal."""
        self.steps = {**self.steps, **facts.intervals}
        self.measured |= set(facts.intervals)
        self.restores, self.remote_restores = facts.restores, facts.remote_restores
