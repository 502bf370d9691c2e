"""The recovery core's memory: what it knows between two inputs, and what it is about to ask for.

Only plain data and the few operations that every room of the core needs. The rooms, in the order
of their dependencies: `ending`, `faults`, `forming`, `hearing`, `assembly`, `core`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from holdfast_service.incidents import Incident
from holdfast_service.policy import ErrorMark, Fault
from holdfast_service.ranks import Home
from holdfast_service.recovery.config import RecoveryConfig
from holdfast_service.recovery.effects import Effect, Emit
from holdfast_service.recovery.facts import Facts
from holdfast_service.recovery.roster import Roster
from holdfast_service.recovery.saves import RemoteSaves
from holdfast_service.registry import BadCopy, Branch, Line
from holdfast_service.reports import EventKind, Phase
from holdfast_workers.messages import Restore, Signal


class Stage(Enum):
    """Where the core stands. Every one but RUNNING and ENDED has a deadline."""

    ASSEMBLING = auto()  # waits for enough agents to start
    ADOPTING = auto()  # a restarted supervisor waits for the agents' reports
    GATHERING = auto()  # the world is condemned; waits for the siblings of the first signal
    FENCING = auto()  # the next attempt is announced; waits for every agent to make way
    WAITING = auto()  # too few agents; waits for one
    FORMING = auto()  # waits for all ranks to join, then for the first step
    RUNNING = auto()
    FINISHING = auto()  # a rank has done its last step; waits for the others and the checkpoint
    ENDED = auto()


WITH_WORLD = frozenset({Stage.GATHERING, Stage.FORMING, Stage.RUNNING, Stage.FINISHING})


@dataclass
class Member:
    """A rank of a world. `worker` is None until a forked process has said its name."""

    rank: int
    agent: str
    incarnation: str
    node_id: str
    host: str
    worker: str | None
    role: str
    restore: Restore
    partner: str | None
    pid: int | None = None
    joined: bool = False
    done: bool = False
    phases_s: dict[str, float] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        names = ("rank", "worker", "agent", "incarnation", "node_id", "host", "pid", "role")
        return {**{name: getattr(self, name) for name in names}, "partner": self.partner}


@dataclass
class World:
    """One formed attempt, from its orders to its end."""

    attempt: int
    restored_step: int
    members: dict[int, Member]
    formed_at: float
    joined_at: float | None = None
    first_step: int | None = None
    first_step_at: float | None = None

    def hosts(self) -> set[str]:
        return {member.agent for member in self.members.values()}


@dataclass
class State:
    config: RecoveryConfig
    roster: Roster
    saves: RemoteSaves
    stage: Stage
    since: float
    deadline: float | None
    attempt: int = 0
    world: World | None = None
    last_world: World | None = None
    """The world before this attempt: who had which rank."""
    homes: dict[int, Home] = field(default_factory=dict)
    home_lives: dict[int, str] = field(default_factory=dict)
    line: Line = field(default_factory=Line)
    committed: int = 0
    awaiting: set[str] = field(default_factory=set)
    """Agents that were sent a fence and have not answered."""
    unproven: set[str] = field(default_factory=set)
    """Hosts of the last world, as long as none of its members is known to have left it."""
    batch: list[Fault] = field(default_factory=list)
    failures: tuple[float, ...] = ()
    incident: Incident | None = None
    closed_incident: Incident | None = None
    """The one closed last: a late word on its cause may amend its record."""
    incidents: int = 0
    mark: ErrorMark | None = None
    bad: set[BadCopy] = field(default_factory=set)
    bad_links: set[tuple[str, str]] = field(default_factory=set)
    waiting_for: str = ""
    waiting_until: float | None = None
    """A former supervisor's deadline: a restart does not buy more patience."""
    start_deadline: float = 0.0
    enough_since: float | None = None
    early: list[Signal] = field(default_factory=list)
    """Signals heard before the world they speak of was adopted."""
    phase: Phase = Phase.STARTING
    told_phase: Phase | None = None
    facts: Facts | None = None
    out: list[Effect] = field(default_factory=list)

    def emit(self, kind: EventKind, **data: Any) -> None:
        self.out.append(Emit(kind, data))

    def ask(self, effect: Effect) -> None:
        self.out.append(effect)

    def enter(self, stage: Stage, now: float, wait_s: float | None) -> None:
        """Go to `stage`; `wait_s` None only where nothing is waited for."""
        self.stage, self.since = stage, now
        self.deadline = None if wait_s is None else now + wait_s

    def show(self, phase: Phase) -> None:
        """Tell the world in which phase the job is, once per change."""
        self.phase = phase
        if self.told_phase is not phase:
            self.told_phase = phase
            self.emit(EventKind.PHASE, phase=phase.value)

    def update_incident(self, **changes: Any) -> None:
        if self.incident is not None:
            self.incident = replace(self.incident, **changes)

    def tell_incident(self, kind: EventKind = EventKind.INCIDENT_UPDATED) -> None:
        if self.incident is not None:
            self.emit(kind, **self.incident.data())

    def note(self, what: str) -> None:
        """Something seen that decides nothing but belongs to the open incident's evidence."""
        if self.incident is not None:
            grown = self.incident.with_evidence(what)
            if grown is not self.incident:
                self.incident = grown
                self.tell_incident()

    def spent(self, phase: str, seconds: float) -> None:
        if self.incident is not None:
            self.incident = self.incident.spent(phase, seconds)

    def note_step(self, attempt: int, step: int) -> None:
        """`step` was committed by `attempt`; counts only for the world formed last."""
        newest = self.newest_branch()
        if newest is None or attempt != newest.attempt:
            return
        if step > newest.restored_step:
            self.line = self.line.ran(attempt)
        self.committed = max(self.committed, step)
        if self.mark is not None and step > self.mark.step:
            self.mark = None  # progress: the same error later is a new one

    def newest_branch(self) -> Branch | None:
        return self.line.branches[-1] if self.line.branches else None
