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

from collections.abc import Iterable

from holdfast_service.job_model.supervisor_protocol import Phase
from holdfast_service.policy.causes import Fault, GiveUp
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.effects import Effect
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.recovery.core_state.recovery_config import RecoveryConfig
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.faults import (
    corruption,
    hang_suspicion,
    judgement,
    node_eviction,
    rank_failures,
    straggler_response,
)
from holdfast_service.recovery.nodes import node_eligibility
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
    resizing,
    save_intervals,
)
from holdfast_service.recovery.world import (
    attempt_formation,
    attempt_progress,
    checkpoint_finalization,
    graceful_stop,
    outcome,
    requeue,
)
from holdfast_workers.protocol.signals import NodeUnwell, Signal, StepRecomputed

_MAY_END_WAIT = (
    inputs.AgentLost
    | inputs.LeaseEnded
    | inputs.Fenced
    | inputs.CommandFailed
    | inputs.NodeChecked
    | inputs.LinkChecked
    | inputs.NodesAvoided
    | inputs.RemoteCheckpoints
)
"""Inputs that change the agents, proofs or saved states that an attempt is formed of, or which
nodes may run ranks. `AgentUp` does not belong here: the agent takes part once it has answered the
fence."""
_MAY_FREE_NODE = NodeUnwell | StepRecomputed
"""Details of signals that change which nodes may run ranks."""


class RecoveryCore:
    """The core of one supervisor. `facts`: the replayed journal, for a restarted supervisor."""

    def __init__(self, config: RecoveryConfig, now: float, facts: Facts | None = None) -> None:
        self.state = CoreState.started(config, now, facts)
        """Changed by `handle` alone; others only read it."""

    def handle(self, event: inputs.Input, now: float) -> tuple[Effect, ...]:
        """Handle one input at `now` (`time.time()`); return the effects to execute, in order."""
        state = self.state
        if state.timer.stage is Stage.ENDED:
            return ()
        state.take_effects()  # drops those of an input that raised an error
        if state.facts is None:
            state.set_phase(state.timer.phase)
        faults = _dispatch(state, event, now)
        judgement.report_faults(state, faults, now)
        if state.timer.stage is Stage.ASSEMBLING:
            takeover.check_start(state, now)
        elif state.timer.stage is Stage.ADOPTING:
            faults = takeover.check_adoption(state, now)
            judgement.report_faults(state, faults, now)
        if state.timer.stage is Stage.FENCING or _may_end_wait(event):
            attempt_formation.form_if_ready(state, now)
        if state.inbox.early_signals and state.timer.stage is not Stage.ADOPTING:
            _handle_signals(state, state.inbox.take_signals(), now)
        if state.timer.stage is Stage.RUNNING and state.ending.stop is not None:
            graceful_stop.begin_stop(state, now)
        if state.timer.stage is Stage.RUNNING:
            faults = node_eviction.evict_if_better(state, now)
            faults = node_eviction.let_program_leave(state, faults, now)
            judgement.report_faults(state, faults, now)
        if state.timer.stage is Stage.RUNNING:
            judgement.report_faults(state, resizing.resize_if_due(state, now), now)
        if state.saves.pending:
            checkpoint_finalization.assign_pending(state, now)
        if state.inbox.requested_faults:
            injection_dispatch.dispatch(state)
        return state.take_effects()

    def next_deadline(self) -> float | None:
        """The latest time for the next `Tick`; None only after the end of the job."""
        state = self.state
        if state.timer.stage is Stage.ENDED:
            return None
        deadline = state.timer.deadline
        due = [deadline, hang_suspicion.next_due(state), node_eviction.next_check_due(state)]
        due.append(resizing.next_due(state))
        if state.timer.stage is Stage.RUNNING:
            due.append(state.departure.due_at(state.worlds.attempt))
        if state.roster.live():  # without a live agent there is no retry; a new one gets it at once
            due.append(state.saves.next_retry_at())
        if state.ending.stop is not None:
            due.append(state.ending.stop.deadline)
        return min((at for at in due if at), default=None)

    @property
    def phase(self) -> Phase:
        return self.state.timer.phase

    @property
    def stage(self) -> Stage:
        """The stage of the core, finer than the phase: for logs and tests."""
        return self.state.timer.stage

    @property
    def build(self) -> str:
        """The build of Holdfast that the ranks run, or are to run."""
        return node_eligibility.build_of_job(self.state)

    @property
    def attempt(self) -> int:
        """The newest attempt announced; 0 before the first."""
        return self.state.worlds.attempt

    @property
    def world_size(self) -> int:
        """The number of ranks of the present world; 0 between worlds."""
        world = self.state.worlds.present
        return world.shape.world_size if world is not None else 0

    @property
    def committed(self) -> int:
        """The newest step known to be committed on the present line; 0 if none is."""
        return self.state.progress.committed

    def leave_out_incidents(self, newest: int) -> None:
        """The next incident gets a number above `newest`: the journal may lack the newest ones."""
        self.state.incidents.leave_out(newest)

    @property
    def known_step(self) -> int | None:
        """The same; None if none is."""
        return self.committed if self.state.progress.has_step else None


def _may_end_wait(event: inputs.Input) -> bool:
    if isinstance(event, inputs.Signals):
        return any(isinstance(signal.detail, _MAY_FREE_NODE) for signal in event.signals)
    return isinstance(event, _MAY_END_WAIT)


def _dispatch(state: CoreState, event: inputs.Input, now: float) -> Iterable[Fault]:  # noqa: PLR0912, PLR0915  (one per kind)
    """Pass the input to its room. Returns the faults that it shows."""
    faults: Iterable[Fault] = ()
    match event:
        case inputs.WorkersPolled():
            node_eviction.record_polled_health(state, event)
            _handle_signals(state, missed_signals.record_polled_shards(state, event, now), now)
            _handle_signals(state, missed_signals.find_missed_signals(state, event, now), now)
        case inputs.Signals():
            _handle_signals(state, event.signals, now)
        case inputs.AgentUp():
            faults = agent_lifecycle.handle_agent_up(state, event.report, now)
        case inputs.AgentLost():
            faults = agent_lifecycle.handle_agent_lost(state, event, now)
        case inputs.LeaseEnded():
            faults = agent_lifecycle.handle_lease_ended(state, event, now)
        case inputs.NodeStatus():
            agent_lifecycle.handle_node_status(state, event)
        case inputs.Fenced():
            faults = agent_lifecycle.handle_fenced(state, event, now)
        case inputs.CommandFailed():
            faults = agent_lifecycle.handle_command_failed(state, event, now)
        case inputs.Inspected():
            hang_suspicion.handle_inspected(state, event, now)
        case inputs.StepCommitted():
            hang_suspicion.record_progress(state, event.attempt, event.step, now)
            corruption.expire_recheck(state, event.attempt, event.step, now)
            state.progress.record_protected(event.protected)
            attempt_progress.record_committed_step(state, event.attempt, event.step, now)
            command_retry.repeat_failed_commands(state)
            partners.trust_links_again(state, now)
            partners.free_former_copies(state, event.attempt, event.protected, now)
            resizing.keep_wanted_seats(state, now)
        case inputs.StepsMeasured():
            save_intervals.handle_step_rows(state, event.rows)
            attempt_progress.record_rows(state, event.rows, now)
            state.speeds.add_rows(event.rows, state.worlds.shapes)
            faults = straggler_response.handle_step_rows(state, event.rows, now)
        case inputs.RanksTimed(row=row):
            faults = straggler_response.handle_step_rows(state, (row,), now)
        case inputs.NodeChecked():
            node_eviction.record_node_check(state, event.report)
        case inputs.LinkChecked():
            node_eviction.handle_link_checked(state, event)
        case inputs.NodesAvoided():
            node_eviction.apply_avoided_nodes(state, event.nodes, now)
        case inputs.RemoteCheckpoints():
            checkpoint_finalization.apply_remote_listing(state, event, now)
        case inputs.CheckpointFinalized():
            checkpoint_finalization.handle_finalized(state, event, now)
        case inputs.StopRequested():
            graceful_stop.handle_stop_request(state, event, now)
        case inputs.PartnersSet():
            command_retry.handle_partners_set(state, event)
        case inputs.MeshPrepared():
            state.mesh_change.record_prepared(event.agent)
        case inputs.SizeOrdered():
            resizing.handle_size_order(state, event, now)
        case inputs.NoPlace():
            takeover.give_back_unplaced(state, now)
        case inputs.NodesDraining():
            draining.handle_nodes_draining(state, event, now)
        case inputs.FaultRequested():
            state.inbox.keep_fault(event)
        case inputs.Tick():
            faults = _handle_tick(state, now)
    return faults


def _handle_signals(state: CoreState, signals: Iterable[Signal], now: float) -> None:
    """Handle signals in their order. The faults of each are reported before the next; signals after
    the end of the job are ignored."""
    for signal in signals:
        if state.timer.stage is not Stage.ENDED:
            faults = signal_handlers.handle_signal(state, signal, now)
            judgement.report_faults(state, faults, now)


def _handle_tick(state: CoreState, now: float) -> tuple[Fault, ...]:
    if state.ending.stop is not None and now >= state.ending.stop.deadline:
        graceful_stop.end_by_deadline(state, now)
        return ()
    hang_suspicion.handle_tick(state, now)
    node_eviction.request_due_checks(state, now)
    if state.timer.deadline is None or now < state.timer.deadline:
        return ()
    match state.timer.stage:
        case Stage.ASSEMBLING:
            takeover.handle_start_deadline(state, now)
        case Stage.ADOPTING:
            return takeover.form_new_attempt(state, now)
        case Stage.GATHERING:
            if judgement.judge_batch(state, now):
                attempt_formation.open_attempt(state, now)
        case Stage.FENCING:
            attempt_formation.drop_unanswered_agents(state)
        case Stage.WAITING:
            attempt_formation.form_if_ready(state, now)
            if state.timer.stage is Stage.WAITING:
                _end_after_wait(state, now)
        case Stage.FORMING:
            return rank_failures.handle_forming_deadline(state, now)
        case Stage.FINISHING:
            attempt_progress.handle_finish_deadline(state, now)
        case Stage.RUNNING:
            attempt_progress.advance(state, now)
    return ()


def _end_after_wait(state: CoreState, now: float) -> None:
    waited_s = round(now - state.timer.since, 1)
    others = "".join(
        f"; {agent} {why}" for agent, why in node_eligibility.unsuitable_nodes(state).items()
    )
    waited = f"no {state.timer.waiting_for} within {waited_s:g} s{_after_last_fault(state)}{others}"
    if graceful_stop.ends_as_requested(state, GiveUp("no_replacement", waited), now):
        return
    if state.ending.giving_back is not None:  # it could not be saved in time
        requeue.end(state, now, state.ending.why_giving_back)
    elif state.config.requeues and state.timer.lacks_nodes:
        requeue.give_back(state, now, waited)
    else:
        outcome.fail(state, now, "no_replacement", waited)


def _after_last_fault(state: CoreState) -> str:
    if state.incidents.current is None or not state.incidents.current.faults:
        return ""
    return f", after: {state.incidents.current.faults[-1].what}"
