"""Ranks that compute more slowly than their peers, and the step times that show it.

Values only; `recovery/faults/straggler_response.py` decides what follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from holdfast_service.diagnosis.stragglers import PeerTimes, Straggler
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_workers.protocol.messages import StepRow


@dataclass(frozen=True)
class SlowRank:
    """A rank that computes more slowly than its peers, and the agent that hosted it then."""

    straggler: Straggler
    agent: str
    since: float
    reported: bool = False
    """Whether a fault was reported because the rank has been slow for too long."""


@dataclass
class SlowRanks:
    """The slow ranks of the present world."""

    ranks: Mapping[int, SlowRank] = field(default_factory=dict)
    peer_times: PeerTimes = field(default_factory=PeerTimes)

    def add_row(self, row: StepRow, stages: int) -> list[Straggler]:
        """Add a step; returns the ranks that became slow or recovered. `stages`: of the world's
        pipelines."""
        return self.peer_times.add_row(row, stages)

    def record_slow(self, straggler: Straggler, agent: str, now: float) -> SlowRank:
        """The rank is slow since now."""
        slow = SlowRank(straggler, agent, now)
        self.ranks = {**self.ranks, straggler.rank: slow}
        return slow

    def record_recovered(self, rank: int) -> SlowRank | None:
        """The rank is as fast as its peers again. None if it was not slow."""
        removed = self.ranks.get(rank)
        self.ranks = {known: slow for known, slow in self.ranks.items() if known != rank}
        return removed

    def remove_moved(self, hosts: Mapping[int, str]) -> list[SlowRank]:
        """Forget ranks that run on another agent (rank → agent) now: their speed there is not known
        yet."""
        moved = [slow for rank, slow in self.ranks.items() if hosts[rank] != slow.agent]
        for slow in moved:
            self.record_recovered(slow.straggler.rank)
            self.peer_times.forget(slow.straggler.rank)
        return moved

    def mark_reported(self, rank: int) -> None:
        """A fault is reported for the rank; it is not reported again."""
        self.ranks = {**self.ranks, rank: replace(self.ranks[rank], reported=True)}

    def restore(self, facts: Facts) -> None:
        """Restore the ranks whose last event in the journal says that they are slow."""
        for rank, event in facts.slow.items():
            straggler = Straggler(rank, event.factor, event.since_step, event.step)
            self.peer_times.remember(straggler)
            self.ranks = {**self.ranks, rank: SlowRank(straggler, event.agent, event.since)}
