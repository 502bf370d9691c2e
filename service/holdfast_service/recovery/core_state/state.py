"""The state of the recovery core between two inputs, and the effects that it is about to return.

Each part of the state has an owner: a small class, which alone changes its fields, by
operations with names (`tests/service/recovery/core_state/test_owners.py` checks it).
Other files read the fields. `CoreState` holds the owners and makes events of their changes. It
decides nothing, and imports nothing from the packages that use it (`nodes`, `upkeep`, `world`,
`faults`, `signals`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast_service.job_model.events.incidents import (
    IncidentClosedEvent,
    IncidentEvent,
    IncidentUpdatedEvent,
)
from holdfast_service.job_model.events.kinds import JobEvent
from holdfast_service.job_model.events.progress import PhaseEvent
from holdfast_service.job_model.lifecycle import Phase
from holdfast_service.job_model.program_levels import ProgramLevel
from holdfast_service.policy.checkpoint_intervals import AutoTier
from holdfast_service.policy.incidents import Incident
from holdfast_service.recovery.core_state.corruption_case import CorruptionCase
from holdfast_service.recovery.core_state.effects import Effect, Emit
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.recovery.core_state.fencing import Fencing
from holdfast_service.recovery.core_state.hang_watch import HangWatch
from holdfast_service.recovery.core_state.inbox import Inbox
from holdfast_service.recovery.core_state.incident_log import FailureBudget, IncidentLog
from holdfast_service.recovery.core_state.mesh_change import Departure, Growth, MeshChange
from holdfast_service.recovery.core_state.mesh_speeds import MeshSpeeds
from holdfast_service.recovery.core_state.node_records import NodeRecords
from holdfast_service.recovery.core_state.progress import Ending, Progress
from holdfast_service.recovery.core_state.recovery_config import RecoveryConfig
from holdfast_service.recovery.core_state.roster import Roster
from holdfast_service.recovery.core_state.save_ledger import SaveIntervals, SaveLedger
from holdfast_service.recovery.core_state.slow_ranks import SlowRanks
from holdfast_service.recovery.core_state.stage_timer import Stage, StageTimer
from holdfast_service.recovery.core_state.worlds import Worlds
from holdfast_workers.training.skipped_windows import Ledger

_PHASES = {
    Stage.ASSEMBLING: "gather",
    Stage.ADOPTING: "gather",
    Stage.GATHERING: "gather",
    Stage.FENCING: "fence",
    Stage.WAITING: "decide",
}
"""Stage → phase of an incident; in all others, the first step is still to come."""


@dataclass
class CoreState:
    """All state of the core, by owner. `emit` and `request` append to `effects`, which `handle`
    returns."""

    config: RecoveryConfig
    timer: StageTimer
    fencing: Fencing
    progress: Progress
    budget: FailureBudget
    saves: SaveLedger
    intervals: SaveIntervals
    ending: Ending
    worlds: Worlds
    growth: Growth
    speeds: MeshSpeeds = field(default_factory=MeshSpeeds)
    roster: Roster = field(default_factory=Roster)
    incidents: IncidentLog = field(default_factory=IncidentLog)
    nodes: NodeRecords = field(default_factory=NodeRecords)
    corruption: CorruptionCase = field(default_factory=CorruptionCase)
    hangs: HangWatch = field(default_factory=HangWatch)
    slow: SlowRanks = field(default_factory=SlowRanks)
    inbox: Inbox = field(default_factory=Inbox)
    mesh_change: MeshChange = field(default_factory=MeshChange)
    departure: Departure = field(default_factory=Departure)
    facts: Facts | None = None
    """The replayed journal, in a restarted supervisor."""
    effects: list[Effect] = field(default_factory=list)

    @classmethod
    def started(cls, config: RecoveryConfig, now: float, facts: Facts | None = None) -> CoreState:
        """The state at the start of a supervisor; `facts` restore a former supervisor's state."""
        limits, first_intervals = config.spec.recovery, config.spec.checkpoint.first_intervals
        state = cls(
            config=config,
            timer=StageTimer.started(now, config.start_timeout_s),
            fencing=Fencing(leased=limits.lease_s > 0),
            progress=Progress(Ledger.of(config.plan.skipped)),
            budget=FailureBudget(limits.window_s),
            saves=SaveLedger(config.remotes),
            intervals=SaveIntervals(dict(zip(AutoTier, first_intervals, strict=True))),
            ending=Ending(config.steps),
            worlds=Worlds(config.best_shape),
            incidents=IncidentLog(count=config.plan.last_incident),
            growth=Growth(limits.grow_after_s, limits.window_s),
        )
        if facts is not None and (facts.attempt or facts.ended):
            state.facts = facts
            state._restore(facts, now)
        return state

    @property
    def knows_step(self) -> bool:
        """Whether the newest step is known: of a recipe it always is."""
        return self.progress.has_step or not self.config.runs_program

    def emit(self, event: JobEvent) -> None:
        self.effects.append(Emit(event))

    def request(self, effect: Effect) -> None:
        self.effects.append(effect)

    def take_effects(self) -> tuple[Effect, ...]:
        """The effects since the last call, in order."""
        taken, self.effects = tuple(self.effects), []
        return taken

    def set_phase(self, phase: Phase) -> None:
        """Set the job's phase; emit a PHASE event once per change."""
        if self.timer.change_phase(phase):
            self.emit(PhaseEvent(phase=phase))

    def emit_incident(self, kind: type[IncidentEvent] = IncidentUpdatedEvent) -> None:
        if self.incidents.current is not None:
            self.emit(kind.of(self.incidents.current))

    @property
    def reached(self) -> int | None:
        """The newest step that the present world has shown; None: none yet."""
        world = self.worlds.present
        has_stepped = world is not None and world.first_step is not None
        return self.progress.committed if has_stepped else None

    def ended_ranks(self) -> dict[int, int]:
        """The ranks whose programs have ended by themselves, in the present world, each with its
        last step; 0: not known. Ranks of a recipe end together."""
        world = self.worlds.present
        if not self.config.runs_program or self.ending.stop is not None:
            return {}
        members = world.members.values() if world is not None else ()
        newest = self.reached or 0
        return {each.rank: each.last_step or newest for each in members if each.done}

    def add_evidence(self, evidence: str) -> None:
        """Add a sentence to the evidence of the open incident. It affects no decision."""
        if self.incidents.add_evidence(evidence):
            self.emit_incident()

    def enter(self, stage: Stage, now: float, wait_s: float | None) -> None:
        """Enter `stage` (see `StageTimer.enter`). The time in the stage before it belongs to that
        stage's phase of the open incident."""
        self.incidents.end_phase(self._phase_of_incident(), now)
        self.timer.enter(stage, now, wait_s)

    def close_incident(self, now: float, resolution: str, end_code: str = "") -> Incident | None:
        """Close the open incident; `end_code`: of the job, if it ends. None if there is none."""
        closed = self.incidents.close(now, self._phase_of_incident(), resolution, end_code)
        if closed is not None:
            self.emit(IncidentClosedEvent.of(closed))
        return closed

    @property
    def level(self) -> int:
        """The highest level at which the job's program has worked with Holdfast."""
        if not self.config.runs_program:
            return ProgramLevel.CONTEXT
        return self.progress.program_level

    @property
    def has_memory_checkpoints(self) -> bool:
        """Whether the job keeps checkpoints in memory: a program does once it has saved one, or
        was offered one."""
        world = self.worlds.present
        is_offered = world is not None and world.restored_step > 0
        return is_offered or self.level >= ProgramLevel.MEMORY_TIER

    def _phase_of_incident(self) -> str:
        """The phase of an incident (`incidents.PHASES`) that the present stage belongs to."""
        world = self.worlds.present
        if self.timer.stage is Stage.FORMING and (world is None or world.joined_at is None):
            return "form"
        return _PHASES.get(self.timer.stage, "first_step")

    def _restore(self, facts: Facts, now: float) -> None:
        """Let each owner restore its part from the journal."""
        shapes = {number: self.config.shape_with(mesh) for number, mesh in facts.meshes.items()}
        self.worlds.restore(facts.attempt, shapes)
        self.speeds.restore(facts, shapes)
        self.progress.restore(facts)
        self.incidents.restore(facts)
        self.budget.restore(facts)
        self.saves.restore(facts)
        self.intervals.restore(facts)
        self.slow.restore(facts)
        self.ending.restore(facts)
        phase = Phase.RECOVERING if facts.incident is not None else Phase.RUNNING
        if not facts.running:
            phase = Phase.STARTING
        if facts.ended is not None:
            self.timer.restore(Phase.ENDED, facts.waiting_until)
            self.timer.enter(Stage.ENDED, now, None)
        else:
            self.timer.restore(phase, facts.waiting_until)
            self.timer.enter(Stage.ADOPTING, now, self.config.adopt_timeout_s)
