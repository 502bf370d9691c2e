"""Finalization of remote checkpoints: assign manifests to agents, and handle finished checkpoints.

A finished checkpoint counts only if it is on the present line; otherwise it is marked bad.
"""

from __future__ import annotations

from holdfast_service.job_model.events.checkpoints import (
    CheckpointBadEvent,
    CheckpointDeletedEvent,
    CheckpointSavedEvent,
)
from holdfast_service.placement.restore_points import RemoteCheckpoint
from holdfast_service.recovery.core_state.inputs import (
    CheckpointFinalized,
    CommandFailed,
    RemoteCheckpoints,
)
from holdfast_service.recovery.core_state.save_ledger import PendingManifest
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.upkeep import remote_tier
from holdfast_service.recovery.world import attempt_progress, outcome, requeue
from holdfast_workers.protocol.commands import FinalizeCheckpoint
from holdfast_workers.protocol.signals import RetentionDone

_RECOVERING = (Stage.GATHERING, Stage.FENCING, Stage.FORMING)


def assign_pending(state: CoreState, now: float) -> None:
    """Assign every complete set of shards without a writer to a live agent."""
    if state.timer.stage in (Stage.ENDED, Stage.ASSEMBLING, Stage.ADOPTING):
        return
    for pending in list(state.saves.pending.values()):
        if not state.progress.line.contains(pending.attempt, pending.step, formed_too=True):
            state.saves.abandon(pending.attempt, pending.step)
        elif pending.agent is None and pending.not_before <= now:
            _assign(state, pending)


def apply_remote_listing(state: CoreState, event: RemoteCheckpoints, now: float) -> None:
    """Apply a new listing of the remote tier. It may contain a checkpoint whose writer died before
    it answered."""
    if not event.known:
        state.saves.record_unreachable(event.problem)
        return
    state.saves.record_listing(event.found)
    for damaged in event.damaged:
        if state.saves.mark_bad(damaged.uri):
            state.emit(CheckpointBadEvent(step=damaged.step, uri=damaged.uri, message=damaged.why))
    _announce_finished(state, now)
    attempt_progress.advance(state, now)


def _announce_finished(state: CoreState, now: float) -> None:
    """Emit every finished checkpoint of the present line, once in the life of the job."""
    for checkpoint in sorted(
        state.saves.remotes.values(), key=lambda checkpoint: (checkpoint.step, checkpoint.attempt)
    ):
        known = checkpoint.uri in state.saves.announced or checkpoint.uri in state.saves.bad_uris
        if known or not state.progress.line.contains(
            checkpoint.attempt, checkpoint.step, formed_too=True
        ):
            continue
        state.saves.record_finished(checkpoint)
        state.saves.announce(checkpoint.uri)
        state.emit(
            CheckpointSavedEvent(
                step=checkpoint.step,
                attempt=checkpoint.attempt,
                tier="remote",
                uri=checkpoint.uri,
                nbytes=checkpoint.nbytes,
                mesh=checkpoint.mesh or state.worlds.shape_of(checkpoint.attempt).mesh,
                metrics=checkpoint.metrics,
            )
        )
        remote_tier.close_outage(state, now, f"step {checkpoint.step} is in the remote tier")


def handle_finalized(state: CoreState, event: CheckpointFinalized, now: float) -> None:
    """Handle a durable manifest. A checkpoint that is off the present line is never used."""
    if event.uri in state.saves.bad_uris:
        return
    is_usable = state.progress.line.contains(event.attempt, event.step, formed_too=True)
    if is_usable:
        state.saves.record_finished(
            RemoteCheckpoint(
                event.step,
                event.attempt,
                event.uri,
                event.nbytes,
                event.metrics,
                state.worlds.shape_of(event.attempt).mesh,
            )
        )
        _announce_finished(state, now)
    else:
        state.saves.abandon(event.attempt, event.step)
        state.saves.mark_bad(event.uri)
        message = f"a later attempt started before step {event.step} of attempt {event.attempt}"
        state.emit(CheckpointBadEvent(step=event.step, uri=event.uri, message=message))
    # Retention must not take an unusable checkpoint for the newest good one.
    remote_tier.request_cleanup(state, event.step)
    if is_usable and event.step >= state.ending.last_step:
        _conclude_last_checkpoint(state, now)
    elif is_usable:
        requeue.end_if_saved(state, (event.attempt, event.step), now)


def handle_finalize_failed(state: CoreState, event: CommandFailed, now: float) -> None:
    """Let another agent write the manifest, a few times; then abandon the checkpoint. If the remote
    tier refuses the manifest, retry without limit."""
    pending = state.saves.pending.get((event.attempt, event.step))
    if pending is None or pending.agent != event.agent:
        return
    if event.refused:
        description = f"agent {event.agent} cannot publish step {event.step}: {event.why}"
        remote_tier.open_outage(
            state,
            now,
            at=now,
            description=description,
            step=event.step,
            rank=None,
            agent=event.agent,
        )
        state.saves.record_refusal(
            event.attempt,
            event.step,
            now,
            pause_s=state.config.finalize_pause_s,
            longest_pause_s=state.config.finalize_longest_pause_s,
        )
    elif state.saves.record_failure(event.attempt, event.step, state.config.finalize_attempts):
        message = f"step {event.step} could not be finalized: {event.why}"
        state.emit(CheckpointBadEvent(step=event.step, message=message))


def handle_tidied(state: CoreState, agent: str, result: RetentionDone, now: float) -> None:
    """Record the result of a cleanup. After a failure, the next cleanup removes the rest."""
    for uri, why in result.deleted.items():
        gone = state.saves.record_deleted(uri)
        if gone is not None:
            state.emit(CheckpointDeletedEvent(step=gone.step, uri=uri, why=why))
    if result.message:
        state.add_evidence(f"retention failed on agent {agent}: {result.message}")
    if state.saves.end_tidying(result.step):
        attempt_progress.advance(state, now)


def _conclude_last_checkpoint(state: CoreState, now: float) -> None:
    if state.timer.stage is Stage.FINISHING:
        attempt_progress.advance(state, now)
    elif state.timer.stage is Stage.WAITING or (
        state.ending.stop is not None and state.timer.stage in _RECOVERING
    ):
        outcome.conclude(state, now)
    # Otherwise during a recovery: its attempt only reports the digest of the last state.


def _assign(state: CoreState, pending: PendingManifest) -> None:
    hosts = state.worlds.present.hosts() if state.worlds.present is not None else set()
    chosen = min(
        state.roster.live(),
        key=lambda record: (record.agent == pending.last, record.agent not in hosts),
        default=None,
    )
    if chosen is None:
        return
    state.saves.assign(pending.attempt, pending.step, chosen.agent)
    mesh = state.worlds.shape_of(pending.attempt).mesh
    state.request(
        FinalizeCheckpoint(chosen.agent, pending.step, pending.attempt, chosen.incarnation, mesh)
    )
