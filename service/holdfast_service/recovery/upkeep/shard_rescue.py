"""Remote saves that a loss has left half done: who still holds the missing state saves it.

Promises: a shard is asked for only of a step that is part of history, newer than the newest
finished checkpoint, and of which every shard is durable, on its way, or in the memory of an agent
that is there; of the same life of an agent, once.
"""

from __future__ import annotations

from holdfast_service.placement.restore_points import Copy, is_mesh, shelves
from holdfast_service.recovery.core_state.effects import SaveShard
from holdfast_service.recovery.core_state.roster import AgentRecord, copies
from holdfast_service.recovery.core_state.state import State


def save_for_the_lost(state: State, records: list[AgentRecord]) -> None:
    """`records`: the agents that have made way, so that their inventories stand still."""
    saves = state.saves
    if not saves.known:
        return  # it may be there already
    newest = saves.newest(state.line)
    saving = (shard for record in records for shard in record.report.saving)
    for (attempt, step), covered in sorted(saves.incomplete(saving).items()):
        is_newer = newest is None or step > newest.step
        if not is_newer or not state.line.holds(attempt, step, formed_too=True):
            continue
        held = _held(state, records, attempt, step)
        missing = set(range(state.config.world_size)) - covered
        if missing <= held.keys():
            for rank in sorted(missing):
                _ask(state, min(held[rank], key=lambda one: (one.held.place, one.agent)))


def _held(
    state: State, records: list[AgentRecord], attempt: int, step: int
) -> dict[int, tuple[Copy, ...]]:
    for shelf in shelves(copies(records), frozenset(state.bad)):
        of_this = (shelf.attempt, shelf.step) == (attempt, step)
        if of_this and is_mesh(shelf.mesh, state.config.mesh):
            return dict(shelf.copies)
    return {}


def _ask(state: State, copy: Copy) -> None:
    held = copy.held
    order = (copy.agent, copy.incarnation, held.rank, held.attempt, held.step)
    if order not in state.saves.asked:
        state.saves.asked.add(order)
        name = (held.rank, held.place, held.attempt, held.step)
        state.ask(SaveShard(copy.agent, *name, copy.incarnation))
