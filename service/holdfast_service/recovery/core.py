"""The recovery core: a sans-I/O state machine that forms attempts and gets over faults.

It owns the decisions of a supervisor and nothing else: no clock, no I/O, no Ray. The shell feeds
inputs with the present time and carries out the effects in order. What others lean on:

- Attempt numbers only grow; a world is formed at most once per number, only of agents that have
  made way for it, and of workers not known to be dead.
- Every stage has a deadline (while running, it moves with the steps); every job that ends has a
  named reason.
- After `End` there is no further effect.
"""

from __future__ import annotations

from holdfast_service.job_model.supervisor_protocol import Phase
from holdfast_service.placement.rank_assignment import listed
from holdfast_service.policy.causes import Cause, Fault, GiveUp
from holdfast_service.policy.checkpoint_intervals import AutoTier
from holdfast_service.recovery.core_state.effects import Effect
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.recovery.core_state.inputs import (
    AgentLost,
    AgentUp,
    CheckpointFinalized,
    CommandFailed,
    Exchanged,
    FaultWanted,
    Fenced,
    Input,
    Inspected,
    LeaseEnded,
    NodeChecked,
    NodesAvoided,
    NodesDraining,
    NodeWord,
    PartnersSet,
    RemoteCheckpoints,
    Signals,
    StepCommitted,
    StepsMeasured,
    StopRequested,
    Tick,
    WorkersSeen,
)
from holdfast_service.recovery.core_state.recovery_config import RecoveryConfig
from holdfast_service.recovery.core_state.roster import Roster
from holdfast_service.recovery.core_state.save_ledger import RemoteSaves
from holdfast_service.recovery.core_state.state import Stage, State
from holdfast_service.recovery.faults import (
    corruption,
    hang_suspicion,
    judgement,
    node_eviction,
    straggler_response,
)
from holdfast_service.recovery.signals import (
    agent_lifecycle,
    missed_signals,
    signal_handlers,
    takeover,
)
from holdfast_service.recovery.upkeep import (
    command_retry,
    draining,
    injection_dispatch,
    partners,
    save_intervals,
)
from holdfast_service.recovery.world import (
    attempt_formation,
    checkpoint_finalization,
    graceful_stop,
    outcome,
)
from holdfast_workers.training.skipped_windows import Ledger


class RecoveryCore:
    """One per supervisor. `facts`: what the journal says, if this supervisor is not the first."""

    def __init__(self, config: RecoveryConfig, now: float, facts: Facts | None = None) -> None:
        state = State(
            config=config,
            roster=Roster(),
            saves=RemoteSaves(config.world_size, config.remotes),
            stage=Stage.ASSEMBLING,
            since=now,
            deadline=now + config.start_timeout_s,
            start_deadline=now + config.start_timeout_s,
            intervals=dict(zip(AutoTier, config.intervals, strict=True)),
            ledger=Ledger.of(config.skipped),
        )
        self._state = state
        if facts is not None and (facts.attempt or facts.ended):
            _remember(state, facts, now)

    def handle(self, given: Input, now: float) -> tuple[Effect, ...]:
        """Take one input at `now` (`time.time()`); the effects to carry out, in order."""
        state = self._state
        if state.stage is Stage.ENDED:
            return ()
        state.out = []
        if state.facts is None:
            state.show(state.phase)
        self._dispatch(given, now)
        if state.stage is Stage.ASSEMBLING:
            takeover.check_start(state, now)
        elif state.stage is Stage.ADOPTING:
            takeover.check_adoption(state, now)
        if state.stage is Stage.RUNNING and state.stop is not None:
            graceful_stop.begin(state, now)
        node_eviction.leave_if_better(state, now)
        checkpoint_finalization.hand_out(state, now)
        injection_dispatch.hand_out(state)
        return tuple(state.out)

    def next_deadline(self) -> float | None:
        """When to send a `Tick` at the latest; None only once ended."""
        state = self._state
        if state.stage is Stage.ENDED:
            return None
        due = [state.deadline, hang_suspicion.due(state), node_eviction.check_due(state)]
        if state.roster.live():  # else nobody can try: an agent that comes is given it at once
            due.append(state.saves.next_try())
        if state.deadline is not None and state.stop is not None:
            due.append(state.stop.deadline)
        return min((at for at in due if at), default=None)

    @property
    def phase(self) -> Phase:
        return self._state.phase

    @property
    def stage(self) -> Stage:
        """Where the core stands, finer than the phase: for logs and tests."""
        return self._state.stage

    @property
    def attempt(self) -> int:
        """The newest attempt announced; 0 before the first."""
        return self._state.attempt

    @property
    def committed(self) -> int:
        """The newest step known to be committed on the present line of history."""
        return self._state.committed

    def _dispatch(self, given: Input, now: float) -> None:
        state = self._state
        match given:
            case AgentUp() | AgentLost() | LeaseEnded() | NodeWord():
                _came_or_went(state, given, now)
            case Signals():
                signal_handlers.hear_all(state, given.signals, now)
            case (
                Fenced()
                | Inspected()
                | PartnersSet()
                | CommandFailed()
                | WorkersSeen()
                | NodeChecked()
            ):
                _answered(state, given, now)
            case StepCommitted():
                state.protected = max(state.protected, given.protected)
                hang_suspicion.progressed(state, given.attempt, given.step, now)
                corruption.passed(state, given.attempt, given.step, now)
                signal_handlers.first_step_seen(state, given.attempt, given.step, now)
                command_retry.ask_again(state)
                partners.trust_links_again(state, now)
                partners.free_former(state, given.attempt, given.protected, now)
            case StepsMeasured():
                save_intervals.measured(state, given.rows)
                straggler_response.measured(state, given.rows, now)
            case RemoteCheckpoints():
                checkpoint_finalization.replace_known(state, given, now)
            case CheckpointFinalized():
                checkpoint_finalization.finalized(state, given, now)
            case StopRequested():
                graceful_stop.requested(state, given, now)
            case NodesAvoided() | NodesDraining() | Exchanged() | FaultWanted():
                _noted(state, given, now)
            case Tick():
                _tick(state, now)


def _noted(
    state: State, given: NodesAvoided | NodesDraining | Exchanged | FaultWanted, now: float
) -> None:
    match given:
        case NodesDraining():
            draining.told(state, given, now)
        case Exchanged():
            node_eviction.exchanged(state, given)
        case NodesAvoided():
            node_eviction.set_aside(state, given.nodes, now)
        case FaultWanted():
            state.wanted_faults.append(given)


def _came_or_went(
    state: State, given: AgentUp | AgentLost | LeaseEnded | NodeWord, now: float
) -> None:
    match given:
        case AgentUp():
            agent_lifecycle.arrived(state, given.report, now)
        case AgentLost():
            agent_lifecycle.lost(state, given, now)
        case LeaseEnded():
            agent_lifecycle.lapsed(state, given, now)
        case NodeWord():
            agent_lifecycle.node_told(state, given)


def _answered(
    state: State,
    given: Fenced | Inspected | PartnersSet | CommandFailed | WorkersSeen | NodeChecked,
    now: float,
) -> None:
    match given:
        case Fenced():
            agent_lifecycle.made_way(state, given, now)
        case Inspected():
            hang_suspicion.inspected(state, given, now)
        case PartnersSet():
            command_retry.partners_set(state, given)
        case CommandFailed():
            agent_lifecycle.command_failed(state, given, now)
        case WorkersSeen():
            missed_signals.workers_seen(state, given, now)
        case NodeChecked():
            agent_lifecycle.checked(state, given, now)


def _remember(state: State, facts: Facts, now: float) -> None:
    state.facts = facts
    state.attempt, state.line, state.committed = facts.attempt, facts.line, facts.committed
    state.failures, state.incidents, state.incident = (
        facts.failures,
        facts.incidents,
        facts.incident,
    )
    state.preemptions, state.offences = facts.preemptions, facts.offences
    state.floor = facts.floor
    state.without_progress = facts.without_progress
    state.outage = facts.outage
    state.ledger |= facts.ledger
    state.mark, state.bad = facts.mark, set(facts.bad)
    state.saves.bad_uris |= facts.bad_uris
    state.saves.announced |= facts.saved
    state.waiting_until, state.stop = facts.waiting_until, facts.stop
    state.restores, state.remote_restores = facts.restores, facts.remote_restores
    state.intervals |= facts.intervals
    state.chosen |= set(facts.intervals)
    straggler_response.remember(state, facts.slow)
    state.phase = Phase.RECOVERING if facts.incident is not None else Phase.RUNNING
    if not facts.running:
        state.phase = Phase.STARTING
    if facts.ended is not None:
        state.phase = Phase.ENDED
        state.enter(Stage.ENDED, now, None)
    else:
        state.enter(Stage.ADOPTING, now, state.config.adopt_timeout_s)


def _tick(state: State, now: float) -> None:
    if state.stop is not None and now >= state.stop.deadline:
        graceful_stop.give_up(state, now)
        return
    hang_suspicion.tick(state, now)
    node_eviction.check_unchecked(state, now)
    if state.deadline is None or now < state.deadline:
        return
    match state.stage:
        case Stage.ASSEMBLING:
            takeover.start_deadline(state, now)
        case Stage.ADOPTING:
            takeover.form_anew(state, now)
        case Stage.GATHERING:
            if judgement.judge_batch(state, now):
                attempt_formation.open_attempt(state, now)
        case Stage.FENCING:
            attempt_formation.give_up_on_silent(state, now)
        case Stage.WAITING:
            _waited_in_vain(state, now)
        case Stage.FORMING:
            _forming_is_late(state, now)
        case Stage.FINISHING:
            _finish_is_late(state, now)
        case Stage.RUNNING | Stage.ENDED:
            pass


def _waited_in_vain(state: State, now: float) -> None:
    patience_s = round(now - state.since, 1)
    waited = f"no {state.waiting_for}: none came within {patience_s:g} s{_after_what(state)}"
    if not graceful_stop.settles(state, GiveUp("no_replacement", waited), now):
        outcome.fail(state, now, "no_replacement", waited)


def _finish_is_late(state: State, now: float) -> None:
    if outcome.is_durable(state):
        outcome.conclude(state, now)
        return
    late = f"the last checkpoint was not durable within {state.config.finish_timeout_s:g} s"
    late += f": {state.outage.reason}" if state.outage is not None else ""
    outcome.fail(state, now, "final_checkpoint", late)


def _after_what(state: State) -> str:
    if state.incident is None or not state.incident.faults:
        return ""
    return f", after: {state.incident.faults[-1].what}"


def _forming_is_late(state: State, now: float) -> None:
    """A committed step proves that all joined, whatever was not heard; else somebody hangs."""
    world = state.world
    assert world is not None
    if world.first_step is not None:
        for member in world.members.values():
            member.joined = True
        attempt_formation.advance(state, now)
        return
    absent = [m for m in world.members.values() if not (m.joined or m.done)]
    for member in absent:
        if member.worker is not None:
            state.roster.doubt(member.worker)
    ranks = listed([member.rank for member in absent])
    what = f"{ranks} did not join attempt {world.attempt} in time"
    if not absent:
        what = f"attempt {world.attempt} made no step in time after all ranks had joined"
    judgement.accuse(
        state,
        Fault(
            Cause.NO_PROGRESS,
            attempt=world.attempt,
            at=now,
            what=what,
            rank=absent[0].rank if absent else None,
            agent=absent[0].agent if absent else None,
            worker=absent[0].worker if absent else None,
            step=world.restored_step,
            certain=False,
        ),
        now,
    )
