"""A running world changes to another mesh of its job, although nothing has failed.

It shrinks when its user orders fewer nodes, and then gives the others back. It grows when nodes for
a better mesh have been there for a while, or at once if its user ordered that. While it trains on,
processes are prepared for the next mesh; then all ranks leave after one agreed step, whose state is
resharded from memory. Ranks that do not leave in time are fenced, as after a fault.
"""

from __future__ import annotations

from holdfast_service.job_model.events.attempts import StandbyEvent
from holdfast_service.placement.rank_assignment import Shortage
from holdfast_service.placement.world_shape import ShapedAssignment
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.policy.checkpoint_intervals import AutoTier
from holdfast_service.recovery.core_state.effects import KeepSeats
from holdfast_service.recovery.core_state.inputs import SizeOrdered
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.core_state.worlds import AttemptWorld
from holdfast_service.recovery.nodes import mesh_preference, shape_selection
from holdfast_service.recovery.upkeep.partners import mend_partners
from holdfast_workers.protocol.commands import Leave, PrepareMesh


def handle_size_order(state: CoreState, order: SizeOrdered, now: float) -> None:
    """Take the order; `resize_if_due` carries it out. A schedule of meshes takes no orders."""
    if len(state.config.shapes) > 1 and not state.config.schedule:
        state.growth.order(order.nodes, state.config.shapes, is_held=order.is_held)
        keep_wanted_seats(state, now)


def next_due(state: CoreState) -> float | None:
    """The time at which `resize_if_due` must be called."""
    world = state.worlds.present
    if world is None or not _is_running(state):
        return None
    if state.mesh_change.is_under_way(world.attempt):
        return state.mesh_change.deadline
    return state.growth.due_at if world.is_running else None


def resize_if_due(state: CoreState, now: float) -> tuple[Fault, ...]:
    """Prepare a change of the mesh that is due, and order the ranks to leave once it is prepared.
    If they do not, returns the reason to end the world at once."""
    world, change, step = state.worlds.present, state.mesh_change, state.progress.committed
    if world is None or not _is_running(state):
        return ()
    if state.config.schedule:
        _watch_schedule(state, world, now)
    if change.is_under_way(world.attempt) and change.leaving:
        late = now >= change.deadline
        return (resize_fault(world, change.reason, step, now),) if late else ()
    due = None if state.config.schedule else _why_due(state, world, now)
    if due is None:
        change.drop()
    elif not change.is_under_way(world.attempt):
        coming = shape_selection.next_seats(state, now)
        keeps_state = state.intervals.steps[AutoTier.MEMORY] > 0
        if isinstance(coming, Shortage) or not keeps_state:  # there is nothing to prepare
            return (resize_fault(world, due, step, now),)
        _prepare(state, world, coming, due, now)
    elif not change.preparing or now >= change.deadline:
        _order_to_leave(state, world, now)
    return ()


def resize_fault(world: AttemptWorld, what: str, step: int, now: float) -> Fault:
    """The reason to end the world for another mesh. It proves no rank's end."""
    return Fault(Cause.RESIZE, world.attempt, now, what, step=step, certain=False)


def _is_running(state: CoreState) -> bool:
    """Whether all ranks have joined, and may have another mesh. A program may still have to report
    the first step of the attempt."""
    may_change = state.ending.stop is None and len(state.config.shapes) > 1
    return may_change and state.timer.stage is Stage.RUNNING


def _watch_schedule(state: CoreState, world: AttemptWorld, now: float) -> None:
    """The ranks know the step after which they leave. If they trained on, as their partners did not
    hold the state in time, they must leave soon."""
    planned, change = state.config.next_change(world.restored_step), state.mesh_change
    if planned is None or state.progress.committed <= planned:
        return
    if not change.is_under_way(world.attempt):
        why = f"the ranks did not leave after step {planned}, as scheduled"
        change.begin(world.attempt, why, frozenset(), now)
        change.leave(now + state.config.leave_timeout_s)


def _why_due(state: CoreState, world: AttemptWorld, now: float) -> str | None:
    if shape_selection.is_larger_than_ordered(state):
        return f"at most {state.growth.limit} nodes are to train, in place of {world.shape.nodes}"
    return _why_grow(state, now) if world.is_running else None


def _prepare(
    state: CoreState, world: AttemptWorld, coming: ShapedAssignment, reason: str, now: float
) -> None:
    """Order processes for the ranks of the next world, at the seats that they would have now."""
    ranks: dict[str, list[int]] = {}
    for placed in coming.assignment.placed:
        ranks.setdefault(placed.agent, []).append(placed.rank)
    deadline = now + state.config.prepare_timeout_s
    state.mesh_change.begin(world.attempt, reason, frozenset(ranks), deadline)
    for agent, own in sorted(ranks.items()):
        record = state.roster.find(agent)
        life = record.incarnation if record is not None else ""
        state.request(PrepareMesh(agent, world.attempt, coming.shape.mesh, tuple(own), life))


def _order_to_leave(state: CoreState, world: AttemptWorld, now: float) -> None:
    state.mesh_change.leave(now + state.config.leave_timeout_s)
    for agent, incarnation in sorted(world.incarnations()):
        state.request(Leave(agent, world.attempt, incarnation))


def _why_grow(state: CoreState, now: float) -> str | None:
    found = None if state.growth.is_held else shape_selection.better_seats(state, now)
    coming = shape_selection.next_seats(state, now) if found is not None else None
    if found is not None and not (
        isinstance(coming, ShapedAssignment) and coming.shape == found.shape
    ):
        found = None  # the next world would have another mesh
    state.growth.offer(found.shape if found is not None else None, now)
    due_at = state.growth.due_at
    if found is None or due_at is None or now < due_at:
        return None
    size = f"{found.shape.world_size} ranks have room on {found.shape.nodes} nodes"
    instead = f"in place of {state.worlds.shape.world_size} ranks"
    if state.growth.ordered is not None:
        return f"{size}, {instead}, as ordered"
    gain = mesh_preference.larger_worth_growing(state)[found.shape].reason
    since = f"{size} since {now - state.growth.since:.0f} s, {instead}"
    return f"{since}: {gain}" if gain else since


def keep_wanted_seats(state: CoreState, now: float) -> None:
    """Give back the seats that a smaller world does not need, once its own nodes hold every copy of
    the state; ask for all seats again where a larger world is allowed. A restarted supervisor waits
    until it knows where the ranks are."""
    if len(state.config.shapes) == 1 or state.timer.stage is Stage.ADOPTING:
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


def _holders(state: CoreState) -> frozenset[str]:
    """The seats, of those that were kept, that may have the only copies of a rank's state until the
    present world holds all of them: an agent that is lost may only be out of reach."""
    present, last, kept = state.worlds.present, state.worlds.last, state.growth.kept_seats
    if present is not None and present.freed:
        return frozenset()
    members = [member for world in (present, last) if world for member in world.members.values()]
    holders = frozenset(agent for member in members for agent in (member.agent, *member.partners))
    return holders if kept is None else holders & kept


def _wanted_seats(state: CoreState) -> frozenset[str] | None:
    """The seats that the job may use; None if it may use all."""
    growth, world = state.growth, state.worlds.present
    live = frozenset(record.agent for record in state.roster.live())
    too_few = len(live) < state.config.shapes[-1].nodes
    as_many_as_there_are = live | _holders(state) if growth.is_held and not too_few else None
    if growth.limit is None:
        return as_many_as_there_are
    if world is None or not world.freed or shape_selection.is_larger_than_ordered(state):
        return growth.kept_seats
    if world.shape.nodes < growth.limit:
        return as_many_as_there_are  # nodes are missing
    hosts = frozenset(world.hosts())
    return hosts | frozenset(sorted(live - hosts)[: state.config.spec.resources.standby_nodes])
