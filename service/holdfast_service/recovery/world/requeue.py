"""A job that has too few nodes is given back to the queue, after its newest state has been saved.

So is a job whose nodes run several builds of Holdfast after an upgrade, which no world may mix. The
newest step that is whole in memory goes to the remote tier first, for a limited time; then the job
ends as PAUSED with the code `no_nodes`, and the control plane queues it again.
"""

from __future__ import annotations

from holdfast_service.placement.restore_points import HeldCopy, copies_by_step
from holdfast_service.recovery.core_state.roster import copies
from holdfast_service.recovery.core_state.save_ledger import CheckpointKey
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.upkeep import shard_rescue
from holdfast_service.recovery.world import outcome

CODE = "no_nodes"


def give_back(state: CoreState, now: float, why: str) -> None:
    """Save the newest state, unless that was tried, then end the job so that it is queued again."""
    newest = None if state.ending.giving_back is not None else _newest_to_save(state)
    if newest is None:
        end(state, now, why)
        return
    key, held = newest
    state.ending.give_back(key, why)
    state.enter(Stage.WAITING, now, state.config.requeue_save_s)
    for rank in sorted(held):
        shard_rescue.request_save(
            state, min(held[rank], key=lambda copy: (copy.held.place, copy.agent))
        )


def end_if_saved(state: CoreState, key: CheckpointKey, now: float) -> None:
    """A checkpoint has become durable: if the job waits for nothing else, it is given back."""
    if state.ending.giving_back == key and state.timer.stage is Stage.WAITING:
        end(state, now, state.ending.why_giving_back)


def end(state: CoreState, now: float, why: str) -> None:
    durable = state.saves.newest(state.progress.line)
    saved = durable.step if durable is not None else 0
    kept = f"step {saved} is in the remote tier" if saved else "no step was saved"
    kept = outcome.OWN_CHECKPOINTS if state.config.runs_program else kept
    outcome.end_job(
        state,
        now,
        outcome="PAUSED",
        code=CODE,
        message=f"{why}; {kept}",
        step=saved,
        durable_step=saved or None,
    )


def _newest_to_save(
    state: CoreState,
) -> tuple[CheckpointKey, dict[int, tuple[HeldCopy, ...]]] | None:
    """The newest step that is whole in the memory of the agents, if none as new is durable. Only a
    program itself could load its own, so it has none."""
    if state.config.runs_program:
        return None
    durable = state.saves.newest(state.progress.line)
    records = state.roster.fenced(state.worlds.attempt)
    for shelf in copies_by_step(copies(records), state.saves.bad_copies):
        if durable is not None and shelf.step <= durable.step:
            return None
        world_size = state.worlds.shape_of(shelf.attempt).world_size
        whole = set(shelf.copies) >= set(range(world_size))
        if whole and state.progress.line.contains(shelf.attempt, shelf.step, formed_too=True):
            return (shelf.attempt, shelf.step), dict(shelf.copies)
    return None
