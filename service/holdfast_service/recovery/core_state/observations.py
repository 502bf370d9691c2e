"""What the core has observed about ranks: a slow rank, and a rank that may hang.

Values only. `recovery/faults/straggler_response.py` and `recovery/faults/hang_suspicion.py` create
and change them; the core state holds them between two inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast_service.diagnosis.hang_culprit import WorldObservation
from holdfast_service.diagnosis.stragglers import Straggler
from holdfast_workers.protocol.messages import Inspection


@dataclass
class SlowRank:
    """A rank that computes more slowly than its peers, and the agent that hosted it then."""

    straggler: Straggler
    agent: str
    since: float
    reported: bool = False
    """Whether a fault was reported because the rank has been slow for too long."""


@dataclass
class HangSuspicion:
    """One suspected hang: from the first sign until a step is committed or a rank is named."""

    attempt: int
    step: int
    """The suspicion ends when a later step than this one is committed."""
    since: float
    due: float
    """When to inspect next. During an inspection: when to judge without the missing answers."""
    pause_s: float
    number: int = 0
    """Number of the inspection under way, or of the last one."""
    inspected_at: float = 0.0
    awaiting: set[str] = field(default_factory=set)
    """Agents that have not answered the inspection under way."""
    seen: dict[int, Inspection] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)
    """Rank → why it was not seen."""
    unanswered: set[str] = field(default_factory=set)
    """Agents that failed to answer."""
    before: WorldObservation | None = None
    """The inspection that a second one is compared with."""
    stall_emitted: bool = False
    """Whether the STALLED event was emitted for this suspicion."""
    stall_reported: bool = False
    """Whether another rank stalled during the inspection under way: that rank may have been
    inspected too early."""
