"""A running world grows to a better mesh of its job when nodes for it have been there for a while.

The world ends like after a fault that only asks for other seats: the survivors' newest state is
resharded from memory to the larger mesh.
"""

from __future__ import annotations

from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.nodes import shape_selection


def next_due(state: CoreState) -> float | None:
    """When `grow_if_due` must be called."""
    if state.timer.stage is not Stage.RUNNING or state.ending.stop is not None:
        return None
    return state.growth.due_at


def grow_if_due(state: CoreState, now: float) -> tuple[Fault, ...]:
    """The reason to end the world for a better mesh, if it is time. It proves no rank's end."""
    world = state.worlds.present
    if len(state.config.shapes) == 1 or world is None or world.first_step is None:
        return ()
    if state.timer.stage is not Stage.RUNNING or state.ending.stop is not None:
        return ()
    found = shape_selection.better_seats(state, now)
    state.growth.offer(found.shape if found is not None else None, now)
    due_at = state.growth.due_at
    if found is None or due_at is None or now < due_at:
        return ()
    what = (
        f"{found.shape.world_size} ranks have room on {found.shape.nodes} nodes since "
        f"{now - state.growth.since:.0f} s, in place of {world.shape.world_size} ranks"
    )
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
