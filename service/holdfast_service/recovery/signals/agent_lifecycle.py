"""Agents that arrive, end, lose their lease or answer a command: the effect on the attempt.

A loss that proves nothing (`certain` False) never frees a rank by itself: a new world waits for
proof that the old ranks have stopped (`recovery/core_state/fencing.py`).
"""

from __future__ import annotations

from holdfast_service.job_model.events.attempts import StandbyEvent
from holdfast_service.job_model.events.checkpoints import CheckpointBadEvent
from holdfast_service.job_model.events.incidents import IncidentUpdatedEvent
from holdfast_service.placement.rank_assignment import format_ranks
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.recovery.core_state.effects import RemoveAgent
from holdfast_service.recovery.core_state.inputs import (
    AgentLost,
    CommandFailed,
    Fenced,
    LeaseEnded,
    NodeChecked,
    NodeStatus,
)
from holdfast_service.recovery.core_state.roster import Arrival
from holdfast_service.recovery.core_state.stage_timer import WITH_WORLD, Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.faults import hang_suspicion, judgement, node_eviction
from holdfast_service.recovery.signals import signal_handlers
from holdfast_service.recovery.upkeep import command_retry, injection_dispatch, remote_outage
from holdfast_service.recovery.upkeep.partners import mend_partners
from holdfast_service.recovery.world import attempt_formation
from holdfast_workers.protocol.answers import AgentReport
from holdfast_workers.protocol.commands import CommandKind

REPEATED_COMMANDS = frozenset(
    {
        CommandKind.SET_PARTNERS,
        CommandKind.SET_INTERVALS,
        CommandKind.FREE_MEMORY,
        CommandKind.WARM_UP,
    }
)


def handle_agent_up(state: CoreState, report: AgentReport, now: float) -> None:
    """Record an agent that is present: new, back, restarted, or unchanged."""
    if (report.agent, report.incarnation) in state.fencing.dead:
        return
    arrival = state.roster.record_report(report)
    if arrival is Arrival.STALE:
        return
    state.fencing.record_alive(report.agent, report.incarnation)
    if arrival is not Arrival.KNOWN:
        state.fencing.expect_no_answer(report.agent)  # its former incarnation will not answer
    _record_shards(state, report)
    if arrival is Arrival.RESTARTED:
        _drop_former_incarnation(state, report.agent, now)
    record = state.roster.find(report.agent)
    if record is not None:
        node_eviction.record_health(state, record, report.health)
        if arrival is not Arrival.KNOWN:
            state.nodes.end_check(report.agent)  # an arriving agent has already been checked
    hosting = state.worlds.present is not None and report.agent in state.worlds.present.hosts()
    if record is not None and not hosting and state.timer.stage is not Stage.ENDED:
        attempt_formation.admit_agent(state, record)
        mend_partners(state, now)


def handle_agent_lost(state: CoreState, event: AgentLost, now: float) -> None:
    """Record that an agent has ended or is unreachable."""
    record = state.roster.find(event.agent)
    if event.certain:
        present = record.incarnation if record is not None else ""
        state.fencing.record_ended(event.agent, event.incarnation or present)
    if record is None or not state.roster.is_current(event.agent, event.incarnation):
        _retry_forming(state, now)
        return
    was_live = record.live
    state.roster.mark_lost(event.agent)
    state.saves.release_agent(event.agent)
    state.fencing.expect_no_answer(event.agent)
    world = state.worlds.present if state.timer.stage in WITH_WORLD else state.worlds.last
    if world is not None and event.agent in world.hosts():
        judgement.report_fault(state, _loss_fault(state, event, now), now)
    elif was_live:
        state.emit(StandbyEvent(agent=event.agent, state="lost"))
        state.add_evidence(f"the standby agent {event.agent} is lost: {event.why}")
        mend_partners(state, now)
    _retry_forming(state, now)


def handle_node_checked(state: CoreState, event: NodeChecked, now: float) -> None:
    """Record the check of an avoided node: the node may be used again if it is fit."""
    node_eviction.record_node_check(state, event.report)
    _retry_forming(state, now)


def handle_lease_ended(state: CoreState, event: LeaseEnded, now: float) -> None:
    """Record that the lease of an agent's incarnation has ended."""
    record = state.roster.find(event.agent)
    live = record is not None and record.live and record.incarnation == event.incarnation
    if event.certain:
        state.fencing.record_ended(event.agent, event.incarnation)
        if live:
            handle_agent_lost(
                state, AgentLost(event.agent, "its process has ended", event.incarnation), now
            )
            return
    elif live:
        return  # a late message: the agent is back and has a newer lease
    state.fencing.record_lease_ended(event.agent, event.incarnation)
    _retry_forming(state, now)


def handle_node_status(state: CoreState, event: NodeStatus) -> None:
    """Record whether an agent was lost with its node. This amends the incident of the loss, which
    may already be closed."""
    amended = state.incidents.amend_node_status(event.agent, event.evidence, lost=event.lost)
    if amended is not None:
        state.emit(IncidentUpdatedEvent.of(amended))


def handle_fenced(state: CoreState, event: Fenced, now: float) -> None:
    """Record an agent's answer to the fence. Late answers to older fences are ignored."""
    if event.attempt != state.worlds.attempt or state.timer.stage in (
        Stage.ASSEMBLING,
        Stage.ADOPTING,
    ):
        return
    if (event.agent, event.report.incarnation) in state.fencing.dead:
        return
    arrival = state.roster.record_report(event.report)
    if arrival is Arrival.STALE:
        return
    state.fencing.record_alive(event.agent, event.report.incarnation)
    if arrival is Arrival.RESTARTED:
        _drop_former_incarnation(state, event.agent, now)
    _record_shards(state, event.report)
    if state.timer.stage is Stage.ENDED:
        return
    state.roster.record_fence_answer(event.report, event.attempt)
    state.fencing.record_answer(event.agent, event.report.incarnation)
    state.progress.record_held(event.report.held)
    _retry_forming(state, now)


def handle_command_failed(state: CoreState, event: CommandFailed, now: float) -> None:
    """Handle a failed command. If it was a fence or an order to form, the agent is removed and
    counts as lost."""
    if event.command is CommandKind.FINALIZE_CHECKPOINT:
        _handle_finalize_failed(state, event, now)
        return
    if event.command is CommandKind.INJECT_FAULT:
        injection_dispatch.handle_inject_failed(state, event)
        return
    if event.command is CommandKind.INSPECT:
        hang_suspicion.handle_inspect_failed(state, event, now)
        return
    if event.command is CommandKind.CHECK_NODE:
        node_eviction.handle_check_failed(state, event, now)
        return
    if event.attempt != state.worlds.attempt or event.command not in (
        CommandKind.FENCE,
        CommandKind.FORM,
    ):
        state.add_evidence(f"command {event.command} failed on agent {event.agent}: {event.why}")
        if event.attempt == state.worlds.attempt and event.command in REPEATED_COMMANDS:
            command_retry.record_failure(state, event)
        return
    record = state.roster.find(event.agent)
    if (
        record is None
        or not record.live
        or not state.roster.is_current(event.agent, event.incarnation)
    ):
        return
    why = f"{event.command} of attempt {event.attempt} failed: {event.why}"
    state.request(RemoveAgent(event.agent, why, record.incarnation))
    handle_agent_lost(state, AgentLost(event.agent, why, certain=False), now)


def _record_shards(state: CoreState, report: AgentReport) -> None:
    for shard in report.shards:
        signal_handlers.record_saved_shard(state, shard)


def _drop_former_incarnation(state: CoreState, agent: str, now: float) -> None:
    state.saves.release_agent(agent)
    state.nodes.forget_links_of(agent)
    state.fencing.record_replaced(agent)
    world = state.worlds.present
    if world is None:
        return
    if agent in world.hosts():
        loss = AgentLost(agent, "its process was replaced by a new one")
        judgement.report_fault(state, _loss_fault(state, loss, now), now)
        return
    for member in world.members.values():
        member.lose_partner(agent)


def _loss_fault(state: CoreState, event: AgentLost, now: float) -> Fault:
    world = state.worlds.present or state.worlds.last
    members = world.members.values() if world is not None else ()
    ranks = [member.rank for member in members if member.agent == event.agent]
    return Fault(
        Cause.AGENT_LOST,
        attempt=state.worlds.attempt,
        at=now if event.at is None else event.at,
        what=f"agent {event.agent} with {format_ranks(ranks)} is lost: {event.why}",
        rank=min(ranks, default=None),
        ranks=tuple(ranks),
        agent=event.agent,
        step=state.progress.committed,
        certain=event.certain,
    )


def _handle_finalize_failed(state: CoreState, event: CommandFailed, now: float) -> None:
    """Let another agent write the manifest, a few times; then abandon the checkpoint. If the remote
    tier refuses the manifest, retry without limit."""
    pending = state.saves.pending.get((event.attempt, event.step))
    if pending is None or pending.agent != event.agent:
        return
    if event.refused:
        description = f"agent {event.agent} cannot publish step {event.step}: {event.why}"
        remote_outage.open_outage(
            state,
            now,
            at=now,
            description=description,
            step=event.step,
            rank=None,
            agent=event.agent,
        )
        state.saves.record_refusal(
            event.attempt,
            event.step,
            now,
            pause_s=state.config.finalize_pause_s,
            longest_pause_s=state.config.finalize_longest_pause_s,
        )
    elif state.saves.record_failure(event.attempt, event.step, state.config.finalize_attempts):
        message = f"step {event.step} could not be finalized: {event.why}"
        state.emit(CheckpointBadEvent(step=event.step, message=message))


def _retry_forming(state: CoreState, now: float) -> None:
    """Try to form the attempt if the set of awaited or available agents has changed."""
    if state.timer.stage is Stage.WAITING or (
        state.timer.stage is Stage.FENCING and not state.fencing.awaiting
    ):
        attempt_formation.form_or_wait(state, now)
