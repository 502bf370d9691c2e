"""Draining nodes, which the cluster is about to remove: their ranks leave before the removal.

A draining node is avoided like a cordoned node (`recovery/nodes/node_eligibility.py`): its ranks
move to a standby as soon as a standby is ready (`recovery/faults/node_eviction.py`), and copies
move to other partners. While ranks must stay, their state is saved to the remote tier as often as
possible. The loss of a draining node counts as a preemption and not against the node.
"""

from __future__ import annotations

from holdfast_service.job_model.events.health import NodeDrainingEvent
from holdfast_service.recovery.core_state.inputs import NodesDraining
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.nodes import node_eligibility
from holdfast_service.recovery.upkeep import save_intervals
from holdfast_service.recovery.upkeep.partners import mend_partners
from holdfast_workers.protocol.commands import CommandKind


def handle_nodes_draining(state: CoreState, event: NodesDraining, now: float) -> None:
    """Record draining nodes. A drained node never returns under its id."""
    new = state.nodes.add_draining(event.nodes)
    news = [record for record in state.roster.live() if record.report.node_id in new]
    for record in news:
        members = state.worlds.present.members.values() if state.worlds.present is not None else ()
        state.emit(
            NodeDrainingEvent(
                agent=record.agent,
                node_id=record.report.node_id,
                host=record.report.host,
                ranks=tuple(member.rank for member in members if member.agent == record.agent),
                deadline=state.nodes.draining[record.report.node_id],
            )
        )
    if news:
        mend_partners(state, now)
        _save_as_often_as_possible(state)


def _save_as_often_as_possible(state: CoreState) -> None:
    """Save at every step while ranks are on a draining node, starting with the next steps."""
    world = state.worlds.present
    if world is None or not node_eligibility.any_draining(state, world.hosts()):
        return
    if state.timer.stage is Stage.RUNNING:
        save_intervals.request_intervals(state)
    elif state.timer.stage is Stage.FORMING:
        world.repeat_later(world.members[0].agent, CommandKind.SET_INTERVALS)
