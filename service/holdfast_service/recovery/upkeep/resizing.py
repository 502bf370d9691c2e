"""A running world changes to another mesh of its job, although nothing has failed.

It shrinks at once when its user orders fewer nodes, and then gives the others back. It grows when
nodes for a better mesh have been there for a while, or at once if its user ordered that. The world
ends like after a fault that only asks for other seats: the newest state is resharded from memory.
"""

from __future__ import annotations

from holdfast_service.job_model.events.attempts import StandbyEvent
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.recovery.core_state.effects import KeepSeats
from holdfast_service.recovery.core_state.inputs import SizeOrdered
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.nodes import shape_selection
from holdfast_service.recovery.upkeep.partners import mend_partners


def handle_size_order(state: CoreState, order: SizeOrdered, now: float) -> None:
    """Take the order; `resize_if_due` carries it out."""
    if len(state.config.shapes) > 1:
        state.growth.order(order.nodes, state.config.shapes, is_held=order.is_held)
        keep_wanted_seats(state, now)


def next_due(state: CoreState) -> float | None:
    """When `resize_if_due` must be called."""
    if state.timer.stage is not Stage.RUNNING or state.ending.stop is not None:
        return None
    return state.growth.due_at


def resize_if_due(state: CoreState, now: float) -> tuple[Fault, ...]:
    """The reason to end the world for another mesh, if it is time. It proves no rank's end."""
    world = state.worlds.present
    if len(state.config.shapes) == 1 or world is None or world.first_step is None:
        return ()
    if state.timer.stage is not Stage.RUNNING or state.ending.stop is not None:
        return ()
    if shape_selection.is_larger_than_ordered(state):
        what = f"at most {state.growth.limit} nodes are to train, in place of {world.shape.nodes}"
    elif (grows := _why_grow(state, now)) is not None:
        what = grows
    else:
        return ()
    return (
        Fault(
            Cause.RESIZE,
            attempt=world.attempt,
            at=now,
            what=what,
            step=state.progress.committed,
            certain=False,
        ),
    )


def _why_grow(state: CoreState, now: float) -> str | None:
    found = None if state.growth.is_held else shape_selection.better_seats(state, now)
    state.growth.offer(found.shape if found is not None else None, now)
    due_at = state.growth.due_at
    if found is None or due_at is None or now < due_at:
        return None
    size = f"{found.shape.world_size} ranks have room on {found.shape.nodes} nodes"
    instead = f"in place of {state.worlds.shape.world_size} ranks"
    if state.growth.ordered is not None:
        return f"{size}, {instead}, as ordered"
    return f"{size} since {now - state.growth.since:.0f} s, {instead}"


def keep_wanted_seats(state: CoreState, now: float) -> None:
    """Give back the seats that a smaller world does not need, once its own nodes hold every copy of
    the state; ask for all seats again where a larger world is allowed."""
    if len(state.config.shapes) == 1:
        return
    kept = _wanted_seats(state)
    if not state.growth.keep(kept):
        return
    left = [] if kept is None else [r.agent for r in state.roster.live() if r.agent not in kept]
    for agent in left:
        state.roster.mark_lost(agent)
        state.saves.release_agent(agent)
        state.fencing.expect_no_answer(agent)
        state.emit(StandbyEvent(agent=agent, state="given back"))
    state.request(KeepSeats(kept))
    if left:
        mend_partners(state, now)


def _wanted_seats(state: CoreState) -> frozenset[str] | None:
    """None: all."""
    growth, world = state.growth, state.worlds.present
    live = frozenset(record.agent for record in state.roster.live())
    too_few = len(live) < state.config.shapes[-1].nodes
    as_many_as_there_are = live if growth.is_held and not too_few else None
    if growth.limit is None:
        return as_many_as_there_are
    if world is None or not world.freed or shape_selection.is_larger_than_ordered(state):
        return growth.kept_seats
    if world.shape.nodes < growth.limit:
        return as_many_as_there_are  # nodes are missing
    hosts = frozenset(world.hosts())
    return hosts | frozenset(sorted(live - hosts)[: state.config.standby_nodes])
