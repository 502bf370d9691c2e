"""The stage of the core: which one, since when, and until when.

Invariant: every stage but RUNNING and ENDED has a deadline. A wait for a resource that a former
supervisor began keeps its deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from holdfast_service.job_model.supervisor_protocol import Phase


class Stage(Enum):
    """The stage of the core. Every stage except ENDED has a deadline; the deadline of RUNNING moves
    with the steps (see `recovery/faults/hang_suspicion.py`)."""

    ASSEMBLING = auto()  # waits for enough agents to start
    ADOPTING = auto()  # a restarted supervisor waits for the agents' reports
    GATHERING = auto()  # the world is condemned; waits for signals with the same cause
    FENCING = auto()  # the next attempt is announced; waits for the agents' answers to the fence
    WAITING = auto()  # waits for a resource: an agent, a proof of stop, or the remote tier
    FORMING = auto()  # waits for all ranks to join, then for the first step
    RUNNING = auto()
    FINISHING = auto()  # waits for the last step of all ranks and for its checkpoint
    ENDED = auto()


WITH_WORLD = frozenset({Stage.GATHERING, Stage.FORMING, Stage.RUNNING, Stage.FINISHING})


@dataclass
class StageTimer:
    """The present stage and phase, with the deadline of the stage."""

    stage: Stage
    since: float
    deadline: float | None
    start_deadline: float
    """The deadline of the start of the job, also while its first world waits for a resource."""
    enough_since: float | None = None
    """The time since which enough agents are ready to start; None if there are not enough."""
    waiting_for: str = ""
    """The resource that the stage WAITING waits for."""
    lacks_nodes: bool = False
    """Whether it waits for it because the job has too few nodes."""
    waiting_until: float | None = None
    """A former supervisor's deadline: a restart does not extend the wait."""
    phase: Phase = Phase.STARTING
    emitted_phase: Phase | None = None
    """The phase of the last PHASE event."""

    @classmethod
    def started(cls, now: float, start_timeout_s: float) -> StageTimer:
        deadline = now + start_timeout_s
        return cls(Stage.ASSEMBLING, since=now, deadline=deadline, start_deadline=deadline)

    def enter(self, stage: Stage, now: float, wait_s: float | None) -> None:
        """Enter `stage` with a deadline `wait_s` from now; None if the stage waits for nothing."""
        self.stage, self.since = stage, now
        self.deadline = None if wait_s is None else now + wait_s

    def postpone(self, until: float) -> None:
        """Replace the deadline of the stage."""
        self.deadline = until

    def shorten(self, until: float) -> None:
        """Bring the deadline of the stage forward to `until`; a later `until` changes nothing."""
        self.deadline = until if self.deadline is None else min(self.deadline, until)

    def change_phase(self, phase: Phase) -> bool:
        """Change the job's phase. True if no PHASE event has stated this phase last."""
        self.phase = phase
        is_news = self.emitted_phase is not phase
        self.emitted_phase = phase
        return is_news

    def wait_for_agents(self) -> None:
        """Too few agents are ready to start: wait until the start deadline."""
        self.enough_since, self.deadline = None, self.start_deadline

    def wait_for_standbys(self, now: float, wait_s: float) -> None:
        """Enough agents are ready to start: wait a little longer for standby nodes."""
        self.enough_since = now if self.enough_since is None else self.enough_since
        self.deadline = min(self.start_deadline, self.enough_since + wait_s)

    def limit_to_former_wait(self, patience_s: float, now: float) -> float:
        """`patience_s`, limited once by the deadline of a wait that a former supervisor began."""
        if self.waiting_until is not None:
            patience_s = min(patience_s, max(0.0, self.waiting_until - now))
            self.waiting_until = None
        return patience_s

    def name_resource(self, resource: str, *, lacks_nodes: bool) -> bool:
        """Name the resource that the stage waits for. True if it was another one before."""
        is_news, self.waiting_for = resource != self.waiting_for, resource
        self.lacks_nodes = lacks_nodes
        return is_news

    def forget_resource(self) -> None:
        """A new attempt begins: its wait, if any, is a new one."""
        self.waiting_for = ""

    def end_wait(self) -> None:
        """End the wait; a later one has its own deadline."""
        self.waiting_until = None

    def restore(self, phase: Phase, waiting_until: float | None) -> None:
        """Restore phase and wait from the journal."""
        self.phase, self.waiting_until = phase, waiting_until
