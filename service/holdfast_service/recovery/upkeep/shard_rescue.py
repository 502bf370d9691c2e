"""Completion of remote saves that a loss interrupted: agents save the missing shards from memory.

Invariants: a shard is requested only for a step that is on the present line and newer than the
newest finished checkpoint, and only if every shard of that step is durable, being saved, or in the
memory of an available agent. It is requested once per incarnation of an agent.
"""

from __future__ import annotations

from holdfast_service.placement.restore_points import HeldCopy, copies_by_step, is_mesh
from holdfast_service.recovery.core_state.roster import AgentRecord, copies
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_workers.protocol.commands import SaveShard


def request_missing_shards(state: CoreState, records: list[AgentRecord]) -> None:
    """Request the missing shards. `records`: agents that have answered the fence, so that their
    inventories do not change."""
    saves = state.saves
    if not saves.known:
        return  # the remote tier may already have the checkpoint
    newest = saves.newest(state.progress.line)
    saving = (shard for record in records for shard in record.report.saving)
    for (attempt, step), covered in sorted(saves.incomplete(saving).items()):
        is_newer = newest is None or step > newest.step
        if not is_newer or not state.progress.line.contains(attempt, step, formed_too=True):
            continue
        held = _held_copies(state, records, attempt, step)
        missing = set(range(state.worlds.shape_of(attempt).world_size)) - covered
        if missing <= held.keys():
            for rank in sorted(missing):
                request_save(state, min(held[rank], key=lambda copy: (copy.held.place, copy.agent)))


def _held_copies(
    state: CoreState, records: list[AgentRecord], attempt: int, step: int
) -> dict[int, tuple[HeldCopy, ...]]:
    for shelf in copies_by_step(copies(records), state.saves.bad_copies):
        of_this = (shelf.attempt, shelf.step) == (attempt, step)
        if of_this and is_mesh(shelf.mesh, state.worlds.shape_of(attempt).mesh):
            return dict(shelf.copies)
    return {}


def request_save(state: CoreState, copy: HeldCopy) -> None:
    """Order the agent that holds this copy to save it, once."""
    held = copy.held
    order = (copy.agent, copy.incarnation, held.rank, held.attempt, held.step)
    if state.saves.request_shard(order):
        name = (held.rank, held.place, held.attempt, held.step)
        state.request(SaveShard(copy.agent, *name, copy.incarnation))
