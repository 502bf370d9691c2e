"""The choice of the mesh and of the seats of its ranks, from the nodes that may run ranks.

A job with one mesh keeps its ranks on an avoided node (unfit, cordoned or draining) while no other
node can take them. A job with several meshes leaves such a node for a smaller mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast_service.placement.rank_assignment import CandidateNode, GroupHome, Shortage
from holdfast_service.placement.world_shape import ShapedAssignment, WorldShape, assign_best
from holdfast_service.recovery.core_state.roster import AgentRecord
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.nodes import mesh_preference, situation


def choose_seats(
    state: CoreState, records: list[AgentRecord], now: float
) -> ShapedAssignment | Shortage:
    """The best mesh that the nodes of `records` have room for, and the seats of its ranks."""
    nodes = situation.candidate_nodes(state, records, state.worlds.last_ranks(), now)
    homes = state.worlds.homes_among(records)
    shapes = mesh_preference.wanted_shapes(state)
    return choose_from(shapes, state.worlds.shape, homes, nodes)


def choose_from(
    shapes: Sequence[WorldShape],
    present: WorldShape,
    homes: Mapping[int, GroupHome],
    nodes: Sequence[CandidateNode],
) -> ShapedAssignment | Shortage:
    """See `assign_best`. Avoided nodes are used only if no mesh has room without them. Pure."""
    if len(shapes) > 1:
        found = assign_best(shapes, present, homes, [node for node in nodes if not node.avoid])
        if isinstance(found, ShapedAssignment):
            return found
    return assign_best(shapes, present, homes, nodes)


def better_seats(state: CoreState, now: float) -> ShapedAssignment | None:
    """The seats of a larger mesh that is worth its pause, if good nodes have room for it."""
    better = tuple(mesh_preference.larger_worth_growing(state))
    found = _seats_on_good_nodes(state, better, now) if better else None
    return found if isinstance(found, ShapedAssignment) else None


def next_seats(state: CoreState, now: float) -> ShapedAssignment | Shortage:
    """The seats of the best mesh that good nodes have room for."""
    return _seats_on_good_nodes(state, mesh_preference.wanted_shapes(state), now)


def _seats_on_good_nodes(
    state: CoreState, shapes: Sequence[WorldShape], now: float
) -> ShapedAssignment | Shortage:
    records = state.roster.live()
    nodes = [
        node
        for node in situation.candidate_nodes(state, records, {}, now)
        if not (node.avoid or node.last_resort)
    ]
    homes = state.worlds.homes_among(records)
    return assign_best(shapes, state.worlds.shape, homes, nodes)


def is_larger_than_ordered(state: CoreState) -> bool:
    """Whether the present mesh is larger than the job's user ordered."""
    return state.worlds.shape not in state.growth.allowed(state.config.shapes)
