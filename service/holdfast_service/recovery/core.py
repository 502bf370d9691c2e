"""The recovery core: a sans-I/O state machine that forms attempts and recovers from faults.

The core owns the decisions of a supervisor. It has no clock, no I/O and no Ray. The shell passes
each input (`core_state/inputs.py`) with the present time, and executes the returned effects
(`core_state/effects.py`) in order. Invariants:

- Attempt numbers only grow. A world is formed at most once per number, only of agents that have
  answered the fence of that attempt, and of workers that are not known to be dead.
- Every stage has a deadline (in RUNNING it moves with the steps). Every job that ends has a named
  reason.
- No effect follows `End`.
"""

from __future__ import annotations

from holdfast_service.job_model.supervisor_protocol import Phase
from holdfast_service.placement.rank_assignment import format_ranks
from holdfast_service.policy.causes import Cause, Fault, GiveUp
from holdfast_service.policy.checkpoint_intervals import AutoTier
from holdfast_service.recovery.core_state.effects import Effect
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.recovery.core_state.inputs import (
    AgentLost,
    AgentUp,
    CheckpointFinalized,
    CommandFailed,
    FaultRequested,
    Fenced,
    Input,
    Inspected,
    LeaseEnded,
    LinkChecked,
    NodeChecked,
    NodesAvoided,
    NodesDraining,
    NodeStatus,
    PartnersSet,
    RemoteCheckpoints,
    Signals,
    StepCommitted,
    StepsMeasured,
    StopRequested,
    Tick,
    WorkersPolled,
)
from holdfast_service.recovery.core_state.recovery_config import RecoveryConfig
from holdfast_service.recovery.core_state.roster import Roster
from holdfast_service.recovery.core_state.save_ledger import SaveLedger
from holdfast_service.recovery.core_state.state import CoreState, Stage
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
    """The core of one supervisor. `facts`: the replayed journal, for a restarted supervisor."""

    def __init__(self, config: RecoveryConfig, now: float, facts: Facts | None = None) -> None:
        state = CoreState(
            config=config,
            roster=Roster(),
            saves=SaveLedger(config.world_size, config.remotes),
            stage=Stage.ASSEMBLING,
            since=now,
            deadline=now + config.start_timeout_s,
            start_deadline=now + config.start_timeout_s,
            intervals=dict(zip(AutoTier, config.intervals, strict=True)),
            ledger=Ledger.of(config.skipped),
        )
        self._state = state
        if facts is not None and (facts.attempt or facts.ended):
            _restore_facts(state, facts, now)

    def handle(self, event: Input, now: float) -> tuple[Effect, ...]:
        """Handle one input at `now` (`time.time()`); return the effects to execute, in order."""
        state = self._state
        if state.stage is Stage.ENDED:
            return ()
        state.effects = []
        if state.facts is None:
            state.set_phase(state.phase)
        self._dispatch(event, now)
        if state.stage is Stage.ASSEMBLING:
            takeover.check_start(state, now)
        elif state.stage is Stage.ADOPTING:
            takeover.check_adoption(state, now)
        if state.stage is Stage.RUNNING and state.stop is not None:
            graceful_stop.begin_stop(state, now)
        node_eviction.evict_if_better(state, now)
        checkpoint_finalization.assign_pending(state, now)
        injection_dispatch.dispatch(state)
        return tuple(state.effects)

    def next_deadline(self) -> float | None:
        """The latest time for the next `Tick`; None only after the end of the job."""
        state = self._state
        if state.stage is Stage.ENDED:
            return None
        due = [state.deadline, hang_suspicion.next_due(state), node_eviction.next_check_due(state)]
        if state.roster.live():  # without a live agent there is no retry; a new one gets it at once
            due.append(state.saves.next_retry_at())
        if state.deadline is not None and state.stop is not None:
            due.append(state.stop.deadline)
        return min((deadline for deadline in due if deadline), default=None)

    @property
    def phase(self) -> Phase:
        return self._state.phase

    @property
    def stage(self) -> Stage:
        """The stage of the core, finer than the phase: for logs and tests."""
        return self._state.stage

    @property
    def attempt(self) -> int:
        """The newest attempt announced; 0 before the first."""
        return self._state.attempt

    @property
    def committed(self) -> int:
        """The newest step known to be committed on the present line."""
        return self._state.committed

    def _dispatch(self, event: Input, now: float) -> None:
        state = self._state
        match event:
            case AgentUp() | AgentLost() | LeaseEnded() | NodeStatus():
                _handle_presence(state, event, now)
            case Signals():
                signal_handlers.handle_signals(state, event.signals, now)
            case (
                Fenced()
                | Inspected()
                | PartnersSet()
                | CommandFailed()
                | WorkersPolled()
                | NodeChecked()
            ):
                _handle_answer(state, event, now)
            case StepCommitted():
                state.protected = max(state.protected, event.protected)
                hang_suspicion.record_progress(state, event.attempt, event.step, now)
                corruption.expire_recheck(state, event.attempt, event.step, now)
                signal_handlers.record_committed_step(state, event.attempt, event.step, now)
                command_retry.repeat_failed_commands(state)
                partners.trust_links_again(state, now)
                partners.free_former_copies(state, event.attempt, event.protected, now)
            case StepsMeasured():
                save_intervals.handle_step_rows(state, event.rows)
                straggler_response.handle_step_rows(state, event.rows, now)
            case RemoteCheckpoints():
                checkpoint_finalization.apply_remote_listing(state, event, now)
            case CheckpointFinalized():
                checkpoint_finalization.handle_finalized(state, event, now)
            case StopRequested():
                graceful_stop.handle_stop_request(state, event, now)
            case NodesAvoided() | NodesDraining() | LinkChecked() | FaultRequested():
                _handle_request(state, event, now)
            case Tick():
                _handle_tick(state, now)


def _handle_request(
    state: CoreState, event: NodesAvoided | NodesDraining | LinkChecked | FaultRequested, now: float
) -> None:
    match event:
        case NodesDraining():
            draining.handle_nodes_draining(state, event, now)
        case LinkChecked():
            node_eviction.handle_link_checked(state, event)
        case NodesAvoided():
            node_eviction.apply_avoided_nodes(state, event.nodes, now)
        case FaultRequested():
            state.requested_faults.append(event)


def _handle_presence(
    state: CoreState, event: AgentUp | AgentLost | LeaseEnded | NodeStatus, now: float
) -> None:
    match event:
        case AgentUp():
            agent_lifecycle.handle_agent_up(state, event.report, now)
        case AgentLost():
            agent_lifecycle.handle_agent_lost(state, event, now)
        case LeaseEnded():
            agent_lifecycle.handle_lease_ended(state, event, now)
        case NodeStatus():
            agent_lifecycle.handle_node_status(state, event)


def _handle_answer(
    state: CoreState,
    event: Fenced | Inspected | PartnersSet | CommandFailed | WorkersPolled | NodeChecked,
    now: float,
) -> None:
    match event:
        case Fenced():
            agent_lifecycle.handle_fenced(state, event, now)
        case Inspected():
            hang_suspicion.handle_inspected(state, event, now)
        case PartnersSet():
            command_retry.handle_partners_set(state, event)
        case CommandFailed():
            agent_lifecycle.handle_command_failed(state, event, now)
        case WorkersPolled():
            missed_signals.handle_workers_polled(state, event, now)
        case NodeChecked():
            agent_lifecycle.handle_node_checked(state, event, now)


def _restore_facts(state: CoreState, facts: Facts, now: float) -> None:
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
    state.measured_tiers |= set(facts.intervals)
    straggler_response.restore_slow_ranks(state, facts.slow)
    state.phase = Phase.RECOVERING if facts.incident is not None else Phase.RUNNING
    if not facts.running:
        state.phase = Phase.STARTING
    if facts.ended is not None:
        state.phase = Phase.ENDED
        state.enter_stage(Stage.ENDED, now, None)
    else:
        state.enter_stage(Stage.ADOPTING, now, state.config.adopt_timeout_s)


def _handle_tick(state: CoreState, now: float) -> None:
    if state.stop is not None and now >= state.stop.deadline:
        graceful_stop.end_by_deadline(state, now)
        return
    hang_suspicion.handle_tick(state, now)
    node_eviction.request_due_checks(state, now)
    if state.deadline is None or now < state.deadline:
        return
    match state.stage:
        case Stage.ASSEMBLING:
            takeover.handle_start_deadline(state, now)
        case Stage.ADOPTING:
            takeover.form_new_attempt(state, now)
        case Stage.GATHERING:
            if judgement.judge_batch(state, now):
                attempt_formation.open_attempt(state, now)
        case Stage.FENCING:
            attempt_formation.drop_unanswered_agents(state, now)
        case Stage.WAITING:
            _end_after_wait(state, now)
        case Stage.FORMING:
            _handle_forming_timeout(state, now)
        case Stage.FINISHING:
            _handle_finish_timeout(state, now)
        case Stage.RUNNING | Stage.ENDED:
            pass


def _end_after_wait(state: CoreState, now: float) -> None:
    waited_s = round(now - state.since, 1)
    waited = f"no {state.waiting_for} within {waited_s:g} s{_after_last_fault(state)}"
    if not graceful_stop.ends_as_requested(state, GiveUp("no_replacement", waited), now):
        outcome.fail(state, now, "no_replacement", waited)


def _handle_finish_timeout(state: CoreState, now: float) -> None:
    if outcome.is_last_step_durable(state):
        outcome.conclude(state, now)
        return
    late = f"the last checkpoint was not durable within {state.config.finish_timeout_s:g} s"
    late += f": {state.outage.reason}" if state.outage is not None else ""
    outcome.fail(state, now, "final_checkpoint", late)


def _after_last_fault(state: CoreState) -> str:
    if state.incident is None or not state.incident.faults:
        return ""
    return f", after: {state.incident.faults[-1].what}"


def _handle_forming_timeout(state: CoreState, now: float) -> None:
    """A committed step proves that all ranks joined, even if signals were lost. Without one, a rank
    hangs."""
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
            state.roster.exclude_worker(member.worker)
    ranks = format_ranks([member.rank for member in absent])
    description = f"{ranks} did not join attempt {world.attempt} in time"
    if not absent:
        description = (
            f"attempt {world.attempt} committed no step in time after all ranks had joined"
        )
    judgement.report_fault(
        state,
        Fault(
            Cause.NO_PROGRESS,
            attempt=world.attempt,
            at=now,
            what=description,
            rank=absent[0].rank if absent else None,
            agent=absent[0].agent if absent else None,
            worker=absent[0].worker if absent else None,
            step=world.restored_step,
            certain=False,
        ),
        now,
    )
