"""Agents that arrive, end, lose their lease or answer a command: the effect on the attempt.

A loss that is a fault of the attempt is returned; the core reports it.
A loss that proves nothing (`certain` False) never frees a rank by itself: a new world waits for
proof that the old ranks have stopped (`recovery/core_state/fencing.py`).
"""

from __future__ import annotations

from holdfast_service.job_model.events.attempts import StandbyEvent
from holdfast_service.job_model.events.incidents import IncidentUpdatedEvent
from holdfast_service.placement.rank_assignment import format_ranks
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.recovery.core_state.effects import RemoveAgent
from holdfast_service.recovery.core_state.inputs import (
    AgentLost,
    CommandFailed,
    Fenced,
    LeaseEnded,
    NodeStatus,
)
from holdfast_service.recovery.core_state.roster import Arrival
from holdfast_service.recovery.core_state.stage_timer import WITH_WORLD, Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.faults import hang_suspicion, node_eviction
from holdfast_service.recovery.upkeep import command_retry, injection_dispatch
from holdfast_service.recovery.upkeep.partners import mend_partners
from holdfast_service.recovery.world import attempt_formation, checkpoint_finalization
from holdfast_workers.protocol.answers import AgentReport
from holdfast_workers.protocol.commands import CommandKind
from holdfast_workers.protocol.signals import Signal


def handle_agent_up(state: CoreState, report: AgentReport, now: float) -> tuple[Fault, ...]:
    """Record an agent that is present: new, back, restarted, or unchanged."""
    arrival, faults = _record_report(state, report, now)
    if arrival is Arrival.STALE:
        return ()
    record = state.roster.find(report.agent)
    if record is not None:
        node_eviction.record_health(state, record, report.health)
        if arrival is not Arrival.KNOWN:
            state.nodes.end_check(report.agent)  # an arriving agent has already been checked
    hosting = state.worlds.present is not None and report.agent in state.worlds.present.hosts()
    if record is not None and not hosting:
        attempt_formation.admit_agent(state, record)
        mend_partners(state, now)
    return faults


def handle_agent_lost(state: CoreState, event: AgentLost, now: float) -> tuple[Fault, ...]:
    """Record that an agent has ended or is unreachable."""
    record = state.roster.find(event.agent)
    if event.certain:
        present = record.incarnation if record is not None else ""
        _record_end(state, event.agent, event.incarnation or present, event.why)
    if record is None or not state.roster.is_current(event.agent, event.incarnation):
        return ()
    was_live = record.live
    state.roster.mark_lost(event.agent)
    state.saves.release_agent(event.agent)
    state.fencing.expect_no_answer(event.agent)
    world = state.worlds.present if state.timer.stage in WITH_WORLD else state.worlds.last
    if world is not None and event.agent in world.hosts():
        return (_loss_fault(state, event, now),)
    if was_live:
        state.emit(StandbyEvent(agent=event.agent, state="lost"))
        state.add_evidence(f"the standby agent {event.agent} is lost: {event.why}")
        mend_partners(state, now)
    return ()


def handle_lease_ended(state: CoreState, event: LeaseEnded, now: float) -> tuple[Fault, ...]:
    """Record that the lease of an agent's incarnation has ended."""
    record = state.roster.find(event.agent)
    live = record is not None and record.live and record.incarnation == event.incarnation
    if event.certain and live:
        loss = AgentLost(event.agent, "its process has ended", event.incarnation)
        return handle_agent_lost(state, loss, now)
    if event.certain:
        state.fencing.record_ended(event.agent, event.incarnation)
    elif live:
        return ()  # a late message: the agent is back and has a newer lease
    state.fencing.record_lease_ended(event.agent, event.incarnation)
    return ()


def handle_node_status(state: CoreState, event: NodeStatus) -> None:
    """Record whether an agent was lost with its node. This amends the incident of the loss, which
    may already be closed."""
    amended = state.incidents.amend_node_status(event.agent, event.evidence, lost=event.lost)
    if amended is not None:
        state.emit(IncidentUpdatedEvent.of(amended))


def handle_store_lost(state: CoreState, signal: Signal, port: int) -> tuple[Fault, ...]:
    """Record that an agent's rendezvous store has ended. Nobody can join an attempt that forms
    around it; before that, the agent is fenced again, and answers with the port of its next
    store."""
    record, world = state.roster.find(signal.agent), state.worlds.present
    if record is None or record.report.store_port != port:
        return ()  # no attempt is formed around this store
    if state.timer.stage in (Stage.FENCING, Stage.WAITING):
        attempt_formation.admit_agent(state, record)
        return ()
    if state.timer.stage is not Stage.FORMING or world is None or world.store != signal.agent:
        return ()
    if world.joined_at is not None:
        return ()  # groups that are formed need no store
    what = f"the rendezvous store of attempt {world.attempt} on {signal.agent} ended"
    fault = Fault(
        Cause.COMMUNICATION,
        attempt=world.attempt,
        at=signal.at,
        what=what,
        agent=signal.agent,
        step=world.restored_step,
        certain=False,
    )
    return (fault,)


def handle_fenced(state: CoreState, event: Fenced, now: float) -> tuple[Fault, ...]:
    """Record an agent's answer to the fence. Late answers to older fences are ignored."""
    if event.attempt != state.worlds.attempt or state.timer.stage in (
        Stage.ASSEMBLING,
        Stage.ADOPTING,
    ):
        return ()
    arrival, faults = _record_report(state, event.report, now)
    if arrival is Arrival.STALE:
        return ()
    state.roster.record_fence_answer(event.report, event.attempt)
    state.fencing.record_answer(event.agent, event.report.incarnation)
    state.progress.record_held(event.report.held)
    return faults


def handle_command_failed(state: CoreState, event: CommandFailed, now: float) -> tuple[Fault, ...]:
    """Handle a failed command. If it was a fence or an order to form, the agent is removed and
    counts as lost."""
    match event.command:
        case CommandKind.FENCE | CommandKind.FORM if event.attempt == state.worlds.attempt:
            return _remove_agent(state, event, now)
        case CommandKind.FINALIZE_CHECKPOINT:
            checkpoint_finalization.handle_finalize_failed(state, event, now)
        case CommandKind.INJECT_FAULT:
            injection_dispatch.handle_inject_failed(state, event)
        case CommandKind.CHECK_NODE:
            node_eviction.handle_check_failed(state, event, now)
        case CommandKind.INSPECT:
            hang_suspicion.handle_inspect_failed(state, event, now)
        case CommandKind.PREPARE_MESH:
            state.mesh_change.record_prepared(event.agent)
        case _:
            command_retry.record_failure(state, event)
    return ()


def _record_end(state: CoreState, agent: str, incarnation: str, why: str) -> None:
    """Record that the process has ended, and remove it: if it lived all the same, its reports would
    be ignored, and its seat would stay empty."""
    state.fencing.record_ended(agent, incarnation)
    state.request(RemoveAgent(agent, why, incarnation))


def _remove_agent(state: CoreState, event: CommandFailed, now: float) -> tuple[Fault, ...]:
    record = state.roster.find(event.agent)
    if (
        record is None
        or not record.live
        or not state.roster.is_current(event.agent, event.incarnation)
    ):
        return ()
    why = f"{event.command} of attempt {event.attempt} failed: {event.why}"
    state.request(RemoveAgent(event.agent, why, record.incarnation))
    return handle_agent_lost(state, AgentLost(event.agent, why, certain=False), now)


def _record_report(
    state: CoreState, report: AgentReport, now: float
) -> tuple[Arrival, tuple[Fault, ...]]:
    """Record a report of an agent that is present. Returns the fault of its former incarnation."""
    if (report.agent, report.incarnation) in state.fencing.dead:
        why = "it answered after its end was reported"
        state.request(RemoveAgent(report.agent, why, report.incarnation))
        return Arrival.STALE, ()
    arrival = state.roster.record_report(report)
    if arrival is Arrival.STALE:
        return arrival, ()
    state.fencing.record_alive(report.agent, report.incarnation)
    if arrival is not Arrival.KNOWN:
        state.fencing.expect_no_answer(report.agent)  # its former incarnation will not answer
    state.saves.record_shards(report.shards, state.progress.line, state.worlds)
    restarted = arrival is Arrival.RESTARTED
    return arrival, _drop_former_incarnation(state, report.agent, now) if restarted else ()


def _drop_former_incarnation(state: CoreState, agent: str, now: float) -> tuple[Fault, ...]:
    state.saves.release_agent(agent)
    state.nodes.forget_links_of(agent)
    state.fencing.record_replaced(agent)
    world = state.worlds.present
    if world is None:
        return ()
    if agent in world.hosts():
        loss = AgentLost(agent, "its process was replaced by a new one")
        return (_loss_fault(state, loss, now),)
    for member in world.members.values():
        member.lose_partner(agent)
    return ()


def _loss_fault(state: CoreState, event: AgentLost, now: float) -> Fault:
    world = state.worlds.present or state.worlds.last
    members = world.members.values() if world is not None else ()
    ranks = [member.rank for member in members if member.agent == event.agent]
    return Fault(
        Cause.AGENT_LOST,
        attempt=world.attempt if world is not None else state.worlds.attempt,
        at=now if event.at is None else event.at,
        what=f"agent {event.agent} with {format_ranks(ranks)} is lost: {event.why}",
        rank=min(ranks, default=None),
        ranks=tuple(ranks),
        agent=event.agent,
        step=state.progress.committed,
        certain=event.certain,
    )
