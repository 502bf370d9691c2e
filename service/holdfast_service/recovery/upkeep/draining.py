"""Nodes that the cluster is about to take away: their ranks leave while there is time.

A node that drains is avoided like a cordoned one (`recovery/nodes/node_eligibility.py`), so ranks
go to a standby as soon as one is ready (`recovery/faults/node_eviction.py`), and copies to partners
elsewhere. As long as ranks have to stay, their state is saved to the remote tier as often as it can
be. What is lost with such a node counts as a preemption, and speaks against nobody.
"""

from __future__ import annotations

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.policy.causes import Fault, came_from_outside
from holdfast_service.recovery.core_state.inputs import NodesDraining
from holdfast_service.recovery.core_state.state import Stage, State
from holdfast_service.recovery.nodes import node_eligibility
from holdfast_service.recovery.upkeep import save_intervals
from holdfast_service.recovery.upkeep.partners import mend_partners


def told(state: State, given: NodesDraining, now: float) -> None:
    """These nodes are to go. One that was told to go never comes back under its id."""
    before = dict(state.draining)
    state.draining.update(given.nodes)
    news = [
        record
        for record in state.roster.live()
        if record.report.node_id in given.nodes.keys() - before.keys()
    ]
    for record in news:
        members = state.world.members.values() if state.world is not None else ()
        state.emit(
            EventKind.NODE_DRAINING,
            agent=record.agent,
            node_id=record.report.node_id,
            host=record.report.host,
            ranks=[one.rank for one in members if one.agent == record.agent],
            deadline=state.draining[record.report.node_id],
        )
    if news:
        mend_partners(state, now)
        _save_often(state)


def on_notice(state: State, fault: Fault) -> bool:
    """Whether the fault is the end of a node that was to go."""
    return came_from_outside(fault) and node_eligibility.drains(state, fault.agent)


def _save_often(state: State) -> None:
    """Where ranks are on such a node, from the next steps on."""
    world = state.world
    if world is None or not node_eligibility.any_drains(state, world.hosts()):
        return
    if state.stage is Stage.RUNNING:
        save_intervals.tell(state)
    elif state.stage is Stage.FORMING:
        world.untold.add((world.members[0].agent, "set_intervals"))
