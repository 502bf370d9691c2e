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
from holdfast_service.recovery.core_state.snapshot import CoreSnapshot
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
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


class RecoveryCore:
    """The core of one supervisor. `facts`: the replayed journal, for a restarted supervisor."""

    def __init__(self, config: RecoveryConfig, now: float, facts: Facts | None = None) -> None:
        self._state = CoreState.started(config, now, facts)

    def handle(self, event: Input, now: float) -> tuple[Effect, ...]:
        """Handle one input at `now` (`time.time()`); return the effects to execute, in order."""
        state = self._state
        if state.timer.stage is Stage.ENDED:
            return ()
        state.take_effects()  # drops those of an input that raised an error
        if state.facts is None:
            state.set_phase(state.timer.phase)
        self._dispatch(event, now)
        if state.timer.stage is Stage.ASSEMBLING:
            takeover.check_start(state, now)
        elif state.timer.stage is Stage.ADOPTING:
            takeover.check_adoption(state, now)
        if state.timer.stage is Stage.RUNNING and state.ending.stop is not None:
            graceful_stop.begin_stop(state, now)
        if state.timer.stage is Stage.RUNNING:
            node_eviction.evict_if_better(state, now)
        if state.saves.pending:
            checkpoint_finalization.assign_pending(state, now)
        if state.inbox.requested_faults:
            injection_dispatch.dispatch(state)
        return state.take_effects()

    def next_deadline(self) -> float | None:
        """The latest time for the next `Tick`; None only after the end of the job."""
        state = self._state
        if state.timer.stage is Stage.ENDED:
            return None
        deadline = state.timer.deadline
        due = [deadline, hang_suspicion.next_due(state), node_eviction.next_check_due(state)]
        if state.roster.live():  # without a live agent there is no retry; a new one gets it at once
            due.append(state.saves.next_retry_at())
        if deadline is not None and state.ending.stop is not None:
            due.append(state.ending.stop.deadline)
        return min((at for at in due if at), default=None)

    def snapshot(self) -> CoreSnapshot:
        """The present state as one immutable value: for logs, tests and debugging."""
        return CoreSnapshot.of(self._state)

    @property
    def phase(self) -> Phase:
        return self._state.timer.phase

    @property
    def stage(self) -> Stage:
        """The stage of the core, finer than the phase: for logs and tests."""
        return self._state.timer.stage

    @property
    def attempt(self) -> int:
        """The newest attempt announced; 0 before the first."""
        return self._state.worlds.attempt

    @property
    def committed(self) -> int:
        """The newest step known to be committed on the present line."""
        return self._state.progress.committed

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
                state.progress.record_protected(event.protected)
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
            state.inbox.keep_fault(event)


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


def _handle_tick(state: CoreState, now: float) -> None:
    if state.ending.stop is not None and now >= state.ending.stop.deadline:
        graceful_stop.end_by_deadline(state, now)
        return
    hang_suspicion.handle_tick(state, now)
    node_eviction.request_due_checks(state, now)
    if state.timer.deadline is None or now < state.timer.deadline:
        return
    match state.timer.stage:
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
    waited_s = round(now - state.timer.since, 1)
    waited = f"no {state.timer.waiting_for} within {waited_s:g} s{_after_last_fault(state)}"
    if not graceful_stop.ends_as_requested(state, GiveUp("no_replacement", waited), now):
        outcome.fail(state, now, "no_replacement", waited)


def _handle_finish_timeout(state: CoreState, now: float) -> None:
    if outcome.is_last_step_durable(state):
        outcome.conclude(state, now)
        return
    late = f"the last checkpoint was not durable within {state.config.finish_timeout_s:g} s"
    late += f": {state.incidents.outage.reason}" if state.incidents.outage is not None else ""
    outcome.fail(state, now, "final_checkpoint", late)


def _after_last_fault(state: CoreState) -> str:
    if state.incidents.current is None or not state.incidents.current.faults:
        return ""
    return f", after: {state.incidents.current.faults[-1].what}"


def _handle_forming_timeout(state: CoreState, now: float) -> None:
    """A committed step proves that all ranks joined, even if signals were lost. Without one, a rank
    hangs."""
    world = state.worlds.present
    assert world is not None
    if world.first_step is not None:
        for member in world.members.values():
            member.record_joined()
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
