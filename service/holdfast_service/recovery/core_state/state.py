"""The state of the recovery core between two inputs, and the effects that it is about to return.

Only plain data and the few operations that every package of the core needs; no decisions. The state
imports nothing from the packages that use it (`nodes`, `upkeep`, `world`, `faults`, `signals`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from holdfast_service.diagnosis.silent_corruption import Evidence
from holdfast_service.diagnosis.stragglers import PeerTimes
from holdfast_service.job_model.events.attempts import SeatedRank
from holdfast_service.job_model.events.incidents import IncidentEvent, IncidentUpdatedEvent
from holdfast_service.job_model.events.kinds import JobEvent
from holdfast_service.job_model.events.progress import PhaseEvent
from holdfast_service.job_model.lifecycle import Phase, StopOrder
from holdfast_service.placement.rank_assignment import GroupHome
from holdfast_service.placement.replica_placement import Placement
from holdfast_service.placement.restore_points import AttemptBranch, BadCopy, HistoryLine
from holdfast_service.policy.causes import ErrorMark, Fault, Offence
from holdfast_service.policy.checkpoint_intervals import AutoTier, SaveCosts
from holdfast_service.policy.decision_ladder import Decision
from holdfast_service.policy.incidents import Incident
from holdfast_service.policy.quarantine import Avoided
from holdfast_service.recovery.core_state.effects import Effect, Emit
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.recovery.core_state.inputs import FaultRequested
from holdfast_service.recovery.core_state.observations import HangSuspicion, SlowRank
from holdfast_service.recovery.core_state.recovery_config import RecoveryConfig
from holdfast_service.recovery.core_state.roster import Roster
from holdfast_service.recovery.core_state.save_ledger import SaveLedger
from holdfast_workers.health.findings import HealthFinding
from holdfast_workers.protocol.messages import Restore, Signal, SignalKind
from holdfast_workers.training.skipped_windows import Ledger


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


AgentIncarnation = tuple[str, str]
"""(agent, incarnation)"""


@dataclass(frozen=True)
class AgentHealth:
    """Health of the node of an agent in one incarnation. `number` grows with each of its health
    reports."""

    incarnation: str
    number: int = -1
    reported: tuple[HealthFinding, ...] = ()
    measured: Mapping[str, float] = field(default_factory=dict)
    unreached: HealthFinding | None = None
    """The finding of a failed network check; None if the node is reached."""

    @property
    def findings(self) -> tuple[HealthFinding, ...]:
        return (*self.reported, *([self.unreached] if self.unreached is not None else ()))


@dataclass
class UncheckedAgent:
    """An incarnation of an agent whose node must be checked before use. `due`: when to request the
    check, or to repeat it."""

    incarnation: str
    due: float


@dataclass
class Member:
    """A rank of a world. `worker` is None until the forked process has reported its name."""

    rank: int
    agent: str
    incarnation: str
    node_id: str
    host: str
    worker: str | None
    role: str
    restore: Restore
    partners: tuple[str, ...]
    partners_confirmed: bool = True
    """Whether its agent has confirmed that it replicates to them."""
    pid: int | None = None
    joined: bool = False
    done: bool = False
    phases_s: dict[str, float] = field(default_factory=dict)

    def seated(self) -> SeatedRank:
        """The member as its events describe it."""
        return SeatedRank(
            rank=self.rank,
            worker=self.worker,
            agent=self.agent,
            incarnation=self.incarnation,
            node_id=self.node_id,
            host=self.host,
            pid=self.pid,
            role=self.role,
            partners=self.partners,
        )


@dataclass
class AttemptWorld:
    """One formed attempt, from its orders to its end."""

    attempt: int
    restored_step: int
    members: dict[int, Member]
    formed_at: float
    joined_at: float | None = None
    first_step: int | None = None
    first_step_at: float | None = None
    repeated_at: float | None = None
    """When the world was first known to be past the repeated step (`CoreState.unexplained`)."""
    placement: Placement | None = None
    """Placement of the members' partners; None in a world adopted from a former supervisor."""
    placed_at: float = 0.0
    freed: bool = False
    """Whether the agents were ordered to free copies that this world does not need."""
    commands_to_repeat: set[tuple[str, str]] = field(default_factory=set)
    """(agent, command) of commands that failed and will be repeated."""

    def hosts(self) -> set[str]:
        return {member.agent for member in self.members.values()}

    def incarnations(self) -> set[AgentIncarnation]:
        return {(member.agent, member.incarnation) for member in self.members.values()}


@dataclass
class CoreState:
    """All state of the core. `emit` and `request` append to `effects`, which `handle` returns."""

    config: RecoveryConfig
    roster: Roster
    saves: SaveLedger
    stage: Stage
    since: float
    deadline: float | None
    attempt: int = 0
    world: AttemptWorld | None = None
    last_world: AttemptWorld | None = None
    """The world before this attempt."""
    homes: dict[int, GroupHome] = field(default_factory=dict)
    home_incarnations: dict[int, str] = field(default_factory=dict)
    line: HistoryLine = field(default_factory=HistoryLine)
    ledger: Ledger = field(default_factory=Ledger)
    """Data windows that later attempts skip."""
    guard_trips: set[tuple[int, int, int, str]] = field(default_factory=set)
    """Guard trips already recorded: attempt, step, window, kind."""
    committed: int = 0
    protected: int = -1
    """The newest step known to be in the memory of two nodes for every rank."""
    awaiting: set[str] = field(default_factory=set)
    """Agents that have not answered their fence."""
    unproven: set[AgentIncarnation] = field(default_factory=set)
    """Hosts of the last world that are not yet proven to have stopped stepping."""
    lapsed: set[AgentIncarnation] = field(default_factory=set)
    """Incarnations whose ranks step no more: the process or its lease has ended. An empty
    incarnation stands for the one before this supervisor first reached the agent."""
    dead: set[AgentIncarnation] = field(default_factory=set)
    """Incarnations that are known to have ended: late messages of them are stale."""
    batch: list[Fault] = field(default_factory=list)
    """Faults gathered for the present incident."""
    hang_suspicion: HangSuspicion | None = None
    """The suspected hang under inspection."""
    inspections: int = 0
    progress_at: float = 0.0
    """When the last new step became known."""
    peer_times: PeerTimes = field(default_factory=PeerTimes)
    slow_ranks: dict[int, SlowRank] = field(default_factory=dict)
    """Ranks that compute more slowly than their peers."""
    condemned: set[str] = field(default_factory=set)
    """Workers that are known not to leave their attempt by themselves."""
    failures: tuple[float, ...] = ()
    """When attempts were condemned, for the budget; preemptions are counted separately."""
    preemptions: tuple[float, ...] = ()
    offences: tuple[Offence, ...] = ()
    """Nodes that were to blame within the window."""
    floor: int = 0
    """A step beyond this one is progress. It is the newest step of the present line, counted since
    the last attempt that restored a state off that line."""
    without_progress: int = 0
    """Consecutive attempts that ended without a step beyond `floor`."""
    last_decision: Decision | None = None
    """The decision made when the last attempt was condemned."""
    missed_signals: dict[str, frozenset[tuple[SignalKind, str | None]]] = field(
        default_factory=dict
    )
    """Agent → signals that its last poll showed to be missing: (kind, worker)."""
    ignored_faults: dict[tuple[str, str | None, int | None], float] = field(default_factory=dict)
    """(cause, agent, rank) of faults that were reported and ignored → when."""
    incident: Incident | None = None
    closed_incident: Incident | None = None
    """The incident closed last: a late report on its cause may amend its record."""
    outage: Incident | None = None
    """The open incident of the remote tier; nothing waits for its end."""
    incidents: int = 0
    mark: ErrorMark | None = None
    bad: set[BadCopy] = field(default_factory=set)
    doubted: set[BadCopy] = field(default_factory=set)
    """Copies that are restored only if there is no other state."""
    corrupted: set[int] = field(default_factory=set)
    """Attempts that ended because replicas differed in them."""
    unexplained: Evidence | None = None
    """Replicas differed and no rank could be named: the step is computed again."""
    refereed_rank: int | None = None
    """The rank whose part another node computes, to decide between two differing replicas."""
    sidelined: set[str] = field(default_factory=set)
    """Agents that host no rank until the referee has decided."""
    bad_links: dict[tuple[str, str], float] = field(default_factory=dict)
    """(agent, partner) over which replication failed → until when the link is avoided."""
    health: dict[str, AgentHealth] = field(default_factory=dict)
    """Agent → the last health report of its node."""
    avoided: dict[str, Avoided] = field(default_factory=dict)
    """Nodes that the control plane avoids, by name."""
    draining: dict[str, float | None] = field(default_factory=dict)
    """Ids of nodes that the cluster is about to remove → when, if known."""
    unchecked: dict[str, UncheckedAgent] = field(default_factory=dict)
    """Agents whose node may be used again after a check."""
    waiting_for: str = ""
    waiting_until: float | None = None
    """A former supervisor's deadline: a restart does not extend the wait."""
    start_deadline: float = 0.0
    stop: StopOrder | None = None
    """The requested cancel or pause."""
    intervals: dict[AutoTier, int] = field(default_factory=dict)
    """Steps between two saves, per tier."""
    measured_tiers: set[AutoTier] = field(default_factory=set)
    """Tiers whose interval already follows measured costs."""
    costs: SaveCosts = field(default_factory=SaveCosts)
    restores: int = 0
    """Number of incidents that restored a saved state."""
    remote_restores: int = 0
    """Number of those incidents that needed the remote tier."""
    final_step: int | None = None
    """The last step, set when the first rank reports that it is done."""
    requested_faults: list[FaultRequested] = field(default_factory=list)
    """Requested faults that no agent can inject yet."""
    enough_since: float | None = None
    early_signals: list[Signal] = field(default_factory=list)
    """Signals that arrived before their world was adopted."""
    phase: Phase = Phase.STARTING
    reported_phase: Phase | None = None
    facts: Facts | None = None
    effects: list[Effect] = field(default_factory=list)

    def emit(self, event: JobEvent) -> None:
        self.effects.append(Emit(event))

    def request(self, effect: Effect) -> None:
        self.effects.append(effect)

    def enter_stage(self, stage: Stage, now: float, wait_s: float | None) -> None:
        """Enter `stage` with a deadline `wait_s` from now; None if the stage waits for nothing."""
        self.stage, self.since = stage, now
        self.deadline = None if wait_s is None else now + wait_s

    def set_phase(self, phase: Phase) -> None:
        """Set the job's phase; emit a PHASE event once per change."""
        self.phase = phase
        if self.reported_phase is not phase:
            self.reported_phase = phase
            self.emit(PhaseEvent(phase=phase))

    def update_incident(self, **changes: Any) -> None:
        if self.incident is not None:
            self.incident = replace(self.incident, **changes)

    def emit_incident(self, kind: type[IncidentEvent] = IncidentUpdatedEvent) -> None:
        if self.incident is not None:
            self.emit(kind.of(self.incident))

    def add_evidence(self, evidence: str) -> None:
        """Add a sentence to the evidence of the open incident. It affects no decision."""
        if self.incident is not None:
            amended = self.incident.with_evidence(evidence)
            if amended is not self.incident:
                self.incident = amended
                self.emit_incident()

    def add_phase_time(self, phase: str, seconds: float) -> None:
        if self.incident is not None:
            self.incident = self.incident.with_phase_time(phase, seconds)

    def record_step(self, attempt: int, step: int) -> None:
        """Record that `attempt` committed `step`; ignored unless it formed the last world."""
        newest = self.newest_branch()
        if newest is None or attempt != newest.attempt:
            return
        if step > newest.restored_step:
            self.line = self.line.with_run(attempt)
        self.committed = max(self.committed, step)
        if step > self.floor:
            self.floor, self.without_progress = step, 0
        if self.mark is not None and step > self.mark.step:
            self.mark = None  # after progress, the same error counts as a new error

    def newest_branch(self) -> AttemptBranch | None:
        return self.line.branches[-1] if self.line.branches else None
