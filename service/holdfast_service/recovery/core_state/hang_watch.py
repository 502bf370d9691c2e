"""The suspected hang under inspection, and when the last step became known.

Values only; `recovery/faults/hang_suspicion.py` decides when to inspect and what the answers mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from holdfast_service.diagnosis.hang_culprit import WorldObservation
from holdfast_workers.protocol.messages import Inspection


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
    awaiting: frozenset[str] = frozenset()
    """Agents that have not answered the inspection under way."""
    seen: Mapping[int, Inspection] = field(default_factory=dict)
    silent: Mapping[int, str] = field(default_factory=dict)
    """Rank → why it was not seen."""
    unanswered: frozenset[str] = frozenset()
    """Agents that failed to answer."""
    before: WorldObservation | None = None
    """The inspection that a second one is compared with."""
    stall_emitted: bool = False
    """Whether the STALLED event was emitted for this suspicion."""
    stall_reported: bool = False
    """Whether another rank stalled during the inspection under way: that rank may have been
    inspected too early."""

    def record_stall(self, pause_s: float) -> None:
        """Another rank stalls: inspect soon after the inspection under way, or after the last."""
        if self.awaiting:
            self.stall_reported = True
        else:
            self.due = min(self.due, self.inspected_at + pause_s)

    def begin_inspection(
        self, number: int, agents: frozenset[str], now: float, timeout_s: float
    ) -> None:
        """The agents are asked to inspect their ranks."""
        self.number, self.inspected_at, self.due = number, now, now + timeout_s
        self.seen, self.silent, self.unanswered = {}, {}, frozenset()
        self.awaiting = agents

    def record_answer(
        self,
        agent: str,
        ranks: Iterable[int],
        seen: Mapping[int, Inspection],
        why_unseen: str,
    ) -> bool:
        """Record the agent's answer about its `ranks`. True if no answer is awaited any more."""
        self.awaiting -= {agent}
        self.seen = {**self.seen, **seen}
        self.silent = {**self.silent, **{rank: why_unseen for rank in ranks if rank not in seen}}
        return not self.awaiting

    def record_unanswered(self, agents: Iterable[str]) -> None:
        """These agents failed to answer."""
        self.unanswered |= frozenset(agents)

    def confirm_with_another(self, look: WorldObservation, due: float) -> None:
        """Compare `look` with another inspection at `due`."""
        self.before, self.due = look, due

    def record_stall_event(self) -> bool:
        """Record that the STALLED event is emitted. False if it was emitted before."""
        is_first, self.stall_emitted = not self.stall_emitted, True
        return is_first

    def watch_on(
        self, now: float, *, pause_s: float, longest_pause_s: float, bound: float | None
    ) -> None:
        """Schedule the next inspection: `pause_s` from now if a rank stalled meanwhile, otherwise
        after a pause that doubles each time; at `bound` at the latest."""
        self.before = None
        self.due = now + (pause_s if self.stall_reported else self.pause_s)
        self.stall_reported = False
        if bound is not None:
            self.due = min(self.due, bound)
        self.pause_s = min(2 * self.pause_s, longest_pause_s)


@dataclass
class HangWatch:
    """The state of the watch for hangs. There is at most one suspicion at a time."""

    suspicion: HangSuspicion | None = None
    """The suspected hang under inspection."""
    inspections: int = 0
    """Number of inspections; it separates their answers."""
    progress_at: float = 0.0
    """When the last new step became known."""

    def open(
        self, attempt: int, step: int, now: float, pause_s: float, since: float
    ) -> HangSuspicion:
        """Suspect a hang since `since`; the first inspection is due after `pause_s`."""
        self.suspicion = HangSuspicion(attempt, step, since, due=now + pause_s, pause_s=pause_s)
        return self.suspicion

    def end(self) -> None:
        """End the suspicion: no hang is suspected any more."""
        self.suspicion = None

    def next_number(self) -> int:
        """The number of the next inspection."""
        self.inspections += 1
        return self.inspections

    def record_progress(self, now: float) -> None:
        """A new step became known."""
        self.progress_at = now
