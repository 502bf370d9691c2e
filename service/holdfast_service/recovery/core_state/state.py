"""The recovery core's memory: what it knows between two inputs, and what it is about to ask for.

Only plain data and the few operations that every room of the core needs. The rooms, in the order
of their dependencies: `ending`, `forming`, `stopping`, `faults`, `hearing`, `assembly`, `core`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from holdfast_service.diagnosis.silent_corruption import Evidence
from holdfast_service.diagnosis.stragglers import PeerTimes
from holdfast_service.job_model.supervisor_protocol import EventKind, Phase, Stopping
from holdfast_service.placement.rank_assignment import Home
from holdfast_service.placement.replica_placement import Placement
from holdfast_service.placement.restore_points import BadCopy, Branch, Line
from holdfast_service.policy.causes import ErrorMark, Fault, Offence
from holdfast_service.policy.checkpoint_intervals import AutoTier, Costs
from holdfast_service.policy.decision_ladder import Decision
from holdfast_service.policy.incidents import Incident
from holdfast_service.policy.quarantine import Avoided
from holdfast_service.recovery.core_state.effects import Effect, Emit
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.recovery.core_state.inputs import FaultWanted
from holdfast_service.recovery.core_state.recovery_config import RecoveryConfig
from holdfast_service.recovery.core_state.roster import Roster
from holdfast_service.recovery.core_state.save_ledger import RemoteSaves
from holdfast_workers.health.findings import Finding
from holdfast_workers.protocol.messages import Restore, Signal, SignalKind
from holdfast_workers.training.skipped_windows import Ledger

if TYPE_CHECKING:
    from holdfast_service.recovery.faults.hang_suspicion import Suspicion
    from holdfast_service.recovery.faults.straggler_response import Slow


class Stage(Enum):
    """Where the core stands. Every one but ENDED has a deadline; that of RUNNING moves on
    with the steps (see `suspicion`)."""

    ASSEMBLING = auto()  # waits for enough agents to start
    ADOPTING = auto()  # a restarted supervisor waits for the agents' reports
    GATHERING = auto()  # the world is condemned; waits for the siblings of the first signal
    FENCING = auto()  # the next attempt is announced; waits for every agent to make way
    WAITING = auto()  # too few agents; waits for one
    FORMING = auto()  # waits for all ranks to join, then for the first step
    RUNNING = auto()
    FINISHING = auto()  # the last step is being made or done; waits for the ranks, the checkpoint
    ENDED = auto()


WITH_WORLD = frozenset({Stage.GATHERING, Stage.FORMING, Stage.RUNNING, Stage.FINISHING})


Life = tuple[str, str]
"""An agent, and which of its lives."""


@dataclass(frozen=True)
class Health:
    """Of an agent's node, in one life of it. `number` grows with what the agent says of itself."""

    incarnation: str
    number: int = -1
    found: tuple[Finding, ...] = ()
    measured: Mapping[str, float] = field(default_factory=dict)
    unreached: Finding | None = None
    """What exchanging bytes with others came to, if it failed."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        return (*self.found, *([self.unreached] if self.unreached is not None else ()))


@dataclass
class Unchecked:
    """An agent, in one life of it; `due`: when to have its node checked, or checked once more."""

    incarnation: str
    due: float


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
    partners: tuple[str, ...]
    partners_told: bool = True
    """Whether its agent is known to replicate to them."""
    pid: int | None = None
    joined: bool = False
    done: bool = False
    phases_s: dict[str, float] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        names = ("rank", "worker", "agent", "incarnation", "node_id", "host", "pid", "role")
        return {**{name: getattr(self, name) for name in names}, "partners": list(self.partners)}


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
    repeated_at: float | None = None
    """When it was first known to be past the step in question (`State.unexplained`)."""
    placement: Placement | None = None
    """Of its members' partners; None in a world taken over from a former supervisor."""
    placed_at: float = 0.0
    freed: bool = False
    """Whether agents were told to free what they hold beside it."""
    untold: set[tuple[str, str]] = field(default_factory=set)
    """(agent, command) that failed and is to be asked for again."""

    def hosts(self) -> set[str]:
        return {member.agent for member in self.members.values()}

    def lives(self) -> set[Life]:
        return {(member.agent, member.incarnation) for member in self.members.values()}


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
    ledger: Ledger = field(default_factory=Ledger)
    """Windows of data that no attempt formed from now on reads."""
    trips: set[tuple[int, int, int, str]] = field(default_factory=set)
    """Trips of guards that were heard: attempt, step, window, kind."""
    committed: int = 0
    protected: int = -1
    """The newest step known to lie in the memory of two nodes, for every rank."""
    awaiting: set[str] = field(default_factory=set)
    """Agents that were sent a fence and have not answered."""
    unproven: set[Life] = field(default_factory=set)
    """Hosts of the last world of which it is not known that their ranks step no more."""
    lapsed: set[Life] = field(default_factory=set)
    """Lives of agents whose ranks step no more: they have ended, or their leases have. Without a
    life: whichever the agent was in before this supervisor met it."""
    dead: set[Life] = field(default_factory=set)
    """Lives that are known to have ended: what they said before, and is heard late, is stale."""
    batch: list[Fault] = field(default_factory=list)
    suspicion: Suspicion | None = None
    """Some rank makes no progress, and is being looked at."""
    looks: int = 0
    progress_at: float = 0.0
    """When a step was last known to be new."""
    peer_times: PeerTimes = field(default_factory=PeerTimes)
    slow: dict[int, Slow] = field(default_factory=dict)
    """Ranks that compute more slowly than their peers."""
    condemned: set[str] = field(default_factory=set)
    """Workers that are known not to leave their attempt by themselves."""
    failures: tuple[float, ...] = ()
    """When attempts were condemned, for the budget; those of preemptions apart."""
    preemptions: tuple[float, ...] = ()
    offences: tuple[Offence, ...] = ()
    """Which nodes were to blame within the window."""
    floor: int = 0
    """A step beyond this one is progress: the newest of the present line, since an attempt began
    elsewhere than the one before it."""
    without_progress: int = 0
    """Attempts in a row that ended without a step beyond `floor`."""
    judged: Decision | None = None
    """What was decided when the last attempt was condemned."""
    unheard: dict[str, frozenset[tuple[SignalKind, str | None]]] = field(default_factory=dict)
    """Agent → what its workers should have told, when they were last looked at."""
    let_be: dict[tuple[str, str | None, int | None], float] = field(default_factory=dict)
    """(cause, agent, rank) of faults that were told and ignored, and when."""
    incident: Incident | None = None
    closed_incident: Incident | None = None
    """The one closed last: a late word on its cause may amend its record."""
    outage: Incident | None = None
    """Of the remote tier; nothing waits for its end."""
    incidents: int = 0
    mark: ErrorMark | None = None
    bad: set[BadCopy] = field(default_factory=set)
    doubted: set[BadCopy] = field(default_factory=set)
    """Taken only where there is nothing else."""
    corrupted: set[int] = field(default_factory=set)
    """Attempts that ended because replicas differed in them."""
    unexplained: Evidence | None = None
    """Replicas differed and nobody was named: the step is computed again."""
    refereed: int | None = None
    """The rank whose share another node is to compute, to decide between two that differ."""
    sidelined: set[str] = field(default_factory=set)
    """Agents that get no rank until that is decided."""
    bad_links: dict[tuple[str, str], float] = field(default_factory=dict)
    """(agent, partner) over which replication failed, and until when that is held against it."""
    health: dict[str, Health] = field(default_factory=dict)
    """Agent → what was last heard of its node's health."""
    avoided: dict[str, Avoided] = field(default_factory=dict)
    """Nodes that the control plane has set aside, by name."""
    draining: dict[str, float | None] = field(default_factory=dict)
    """Ids of nodes that the cluster is about to take away, and when, if that is known."""
    unchecked: dict[str, Unchecked] = field(default_factory=dict)
    """Agents whose node is back in use, and is to be checked before."""
    waiting_for: str = ""
    waiting_until: float | None = None
    """A former supervisor's deadline: a restart does not buy more patience."""
    start_deadline: float = 0.0
    stop: Stopping | None = None
    """Somebody asked for an end before the spec's last step."""
    intervals: dict[AutoTier, int] = field(default_factory=dict)
    """Steps between two saves, per tier."""
    chosen: set[AutoTier] = field(default_factory=set)
    """Tiers whose interval follows from measurement by now."""
    costs: Costs = field(default_factory=Costs)
    restores: int = 0
    """Incidents that took training back to a saved state."""
    remote_restores: int = 0
    """Those of them that memory alone could not mend."""
    final_step: int | None = None
    """The last step, once a rank has said that it is done."""
    wanted_faults: list[FaultWanted] = field(default_factory=list)
    """Injected faults that nobody is there to bring about yet."""
    enough_since: float | None = None
    early: list[Signal] = field(default_factory=list)
    """Signals heard before the world they speak of was adopted."""
    phase: Phase = Phase.STARTING
    told_phase: Phase | None = None
    facts: Facts | None = None
    out: list[Effect] = field(default_factory=list)

    def emit(self, kind: EventKind, /, **data: Any) -> None:
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
        if step > self.floor:
            self.floor, self.without_progress = step, 0
        if self.mark is not None and step > self.mark.step:
            self.mark = None  # progress: the same error later is a new one

    def newest_branch(self) -> Branch | None:
        return self.line.branches[-1] if self.line.branches else None
