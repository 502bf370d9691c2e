"""Ranks leave a node that is unhealthy or avoided, if a better node is available.

The fault that this module finds is uncertain: it does not prove that the ranks of the node have
stopped. Only the answer to the fence proves that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast_service.job_model.events.attempts import StandbyEvent
from holdfast_service.job_model.events.health import NodeHealthEvent
from holdfast_service.placement.rank_assignment import GroupHome, Shortage, format_ranks
from holdfast_service.placement.world_shape import ShapedAssignment
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.policy.quarantine import Avoided, node_name
from holdfast_service.recovery.core_state.inputs import CommandFailed, LinkChecked, WorkersPolled
from holdfast_service.recovery.core_state.node_records import AgentHealth, UncheckedAgent
from holdfast_service.recovery.core_state.roster import AgentRecord
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.core_state.worlds import AttemptWorld
from holdfast_service.recovery.nodes import (
    mesh_preference,
    node_eligibility,
    shape_selection,
    situation,
)
from holdfast_workers.protocol.answers import AgentReport
from holdfast_workers.protocol.commands import CheckNode, Leave
from holdfast_workers.protocol.findings import HealthFinding, HealthReport, Level

REMOVAL_MARGIN_S = 2.0
"""The next world forms this long before the cluster removes the node."""


def handle_health_signal(state: CoreState, agent: str, report: HealthReport) -> None:
    """Handle the signal that the health of an agent's node has changed."""
    record = state.roster.find(agent)
    if record is not None:
        record_health(state, record, report)


def record_polled_health(state: CoreState, event: WorkersPolled) -> None:
    """Record the health that a poll shows: the signal of it may have been lost."""
    record = state.roster.find(event.agent)
    if record is not None and record.incarnation == event.incarnation:
        record_health(state, record, event.health)


def record_health(state: CoreState, record: AgentRecord, report: HealthReport) -> None:
    """Record an agent's health report of its node, unless a newer one is known."""
    before = state.nodes.health_of(record.agent, record.incarnation)
    if report.number > before.number:
        health = replace(
            before, number=report.number, reported=report.findings, measured=report.measured
        )
        _store_health(state, record, health)


def handle_link_checked(state: CoreState, event: LinkChecked) -> None:
    """Record the result of a network check: the node is unreachable, or reachable again."""
    record = state.roster.find(event.agent)
    if record is not None and record.incarnation == event.incarnation:
        description = f"bytes do not reach the node of {event.agent} and return intact: {event.why}"
        finding = (
            HealthFinding("exchange", "unreached", Level.UNFIT, description) if event.why else None
        )
        known = state.nodes.health_of(record.agent, record.incarnation)
        _store_health(state, record, replace(known, unreached=finding))


def apply_avoided_nodes(state: CoreState, nodes: Mapping[str, Avoided], now: float) -> None:
    """Replace the set of avoided nodes. A node that may be used again is checked before it gets a
    rank; a node that kept its ranks meanwhile needs no check."""
    back = state.nodes.replace_avoided(nodes)
    homes = {home.agent for home in state.worlds.homes.values()}
    for record in state.roster.live():
        name = node_name(record.report.node_id, record.report.host)
        if name in back and record.agent not in homes:
            state.nodes.require_check(record.agent, record.incarnation, now)
            state.emit(StandbyEvent(agent=record.agent, state="checking"))
    request_due_checks(state, now)


def request_due_checks(state: CoreState, now: float) -> None:
    """Request the node checks that are due."""
    for agent, check in _pending_checks(state).items():
        if check.due <= now:
            state.nodes.repeat_check(agent, now + state.config.check_timeout_s)
            state.request(CheckNode(agent, check.incarnation))


def next_check_due(state: CoreState) -> float | None:
    """The time at which `request_due_checks` must be called."""
    return min((check.due for check in _pending_checks(state).values()), default=None)


def _pending_checks(state: CoreState) -> dict[str, UncheckedAgent]:
    """Pending checks of live agents in the same incarnation: a new incarnation starts with a check
    of its own."""
    live = {record.agent: record for record in state.roster.live()} if state.nodes.unchecked else {}
    return {
        agent: state.nodes.unchecked[agent]
        for agent in live
        if node_eligibility.is_unchecked(state.nodes, live[agent])
    }


def record_node_check(state: CoreState, report: AgentReport) -> None:
    """Record a completed node check; the health report decides on the use of the node."""
    record = state.roster.find(report.agent)
    if record is None or record.incarnation != report.incarnation:
        return
    record_health(state, record, report.health)
    if node_eligibility.is_unchecked(state.nodes, record):
        state.nodes.end_check(report.agent)
        unfit = bool(node_eligibility.why_unfit(state.nodes, record))
        state.emit(StandbyEvent(agent=report.agent, state="unfit" if unfit else "ready"))


def handle_check_failed(state: CoreState, event: CommandFailed, now: float) -> None:
    """Repeat a failed check later: an unchecked node does not count as healthy."""
    check = state.nodes.unchecked.get(event.agent)
    if check is not None and check.incarnation == event.incarnation:
        state.nodes.repeat_check(event.agent, now + state.config.check_pause_s)


def _store_health(state: CoreState, record: AgentRecord, health: AgentHealth) -> None:
    """Store the health and emit an event if it has changed."""
    if not state.nodes.record_health(record.agent, health):
        return
    state.emit(
        NodeHealthEvent(
            agent=record.agent,
            node_id=record.report.node_id,
            host=record.report.host,
            findings=health.findings,
            measured=health.measured,
        )
    )


def evict_if_better(state: CoreState, now: float) -> tuple[Fault, ...]:
    """The faults of nodes that ranks should leave and others can replace, or that cannot run their
    ranks any more."""
    world = state.worlds.present
    if state.timer.stage is not Stage.RUNNING or world is None or state.ending.stop is not None:
        return ()
    records = state.roster.live()
    by_agent = {record.agent: record for record in records}
    hosts = [by_agent[agent] for agent in sorted(world.hosts()) if agent in by_agent]
    left = {
        record.agent: why
        for record in hosts
        if (why := node_eligibility.why_avoided(state, record))
    }
    if not left:
        return ()
    homes = {
        index: GroupHome(home.agent, home.domain, alive=True)
        for index, home in state.worlds.homes.items()
    }
    nodes = situation.candidate_nodes(state, records, {}, now)
    found = shape_selection.choose_from(
        mesh_preference.wanted_shapes(state), world.shape, homes, nodes
    )
    emptied = _emptied(world, homes, found)
    return tuple(
        _fault_of_host(state, world, record, left[record.agent], now)
        for record in hosts
        if record.agent in left
        and (record.agent in emptied or node_eligibility.has_lost_device(state.nodes, record))
    )


def let_program_leave(state: CoreState, faults: tuple[Fault, ...], now: float) -> tuple[Fault, ...]:
    """A program has checkpoints of its own: before its ranks leave a node that still works, it is
    asked to save and to end. Returns the faults that are not to wait for that."""
    world = state.worlds.present
    planned = all(fault.cause is Cause.PREEMPTED for fault in faults)
    if world is not None and state.departure.is_of(world.attempt):
        if now < state.departure.deadline and planned:
            return ()
        fault = state.departure.fault  # its ranks may have ended by now
        state.departure.end()
        return faults or ((fault,) if fault is not None else ())
    if not (faults and state.config.runs_program and planned) or world is None:
        return faults
    deadline = min([now + state.config.leave_timeout_s, *_removals(state, faults)])
    if deadline <= now:
        return faults
    state.departure.begin(world.attempt, faults[0], deadline)
    for agent, incarnation in sorted(world.incarnations()):
        state.request(Leave(agent, world.attempt, incarnation))
    return ()


def _removals(state: CoreState, faults: tuple[Fault, ...]) -> list[float]:
    """The times at which the nodes of these faults must be left: when the cluster removes them,
    less the time to leave."""
    records = [state.roster.find(fault.agent) for fault in faults if fault.agent is not None]
    found = [state.nodes.draining.get(r.report.node_id) for r in records if r is not None]
    return [at - REMOVAL_MARGIN_S for at in found if at is not None]


def _emptied(
    world: AttemptWorld, homes: Mapping[int, GroupHome], found: ShapedAssignment | Shortage
) -> set[str]:
    """The agents that ranks leave for the seats that were found."""
    if isinstance(found, Shortage):
        return set()
    if found.shape == world.shape:
        return {homes[index].agent for index in found.assignment.moved}
    return world.hosts() - {placed.agent for placed in found.assignment.placed}


def _fault_of_host(
    state: CoreState, world: AttemptWorld, record: AgentRecord, why: str, now: float
) -> Fault:
    ranks = tuple(member.rank for member in world.members.values() if member.agent == record.agent)
    unfit = bool(node_eligibility.why_unfit(state.nodes, record))
    condition = "is unhealthy" if unfit else "must be left"
    return Fault(
        Cause.NODE_UNWELL if unfit else Cause.PREEMPTED,
        attempt=world.attempt,
        at=now,
        what=f"the node of {record.agent} with {format_ranks(ranks)} {condition}: {why}",
        rank=min(ranks, default=None),
        ranks=ranks,
        agent=record.agent,
        step=state.progress.committed,
        certain=False,
    )
