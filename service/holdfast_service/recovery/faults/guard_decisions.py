"""Guard trips: the ledger of skipped data windows grows, and steps may be rolled back.

The ranks make the decision, all alike (`holdfast_workers.training.guards`). This module makes it
binding for every later attempt. A trip counts only while no later attempt has formed: a later
attempt received the ledger without it, and may have read the data that this trip skips.
"""

from __future__ import annotations

from holdfast_service.job_model.events.checkpoints import CheckpointBadEvent
from holdfast_service.job_model.events.health import GuardTrippedEvent
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.upkeep import remote_tier
from holdfast_workers.protocol.findings import TripReport


def apply_guard_trip(state: CoreState, attempt: int, report: TripReport) -> None:
    """Apply a trip that all ranks of `attempt` report; repeated reports change nothing. Training
    continues after some trips; then every agent with ranks reports it."""
    trip = (attempt, report.step, report.window, report.kind.value)
    if not state.progress.record_guard_trip(trip):
        return
    if report.skipped is not None:
        state.progress.skip_window(report.skipped)
    if report.back_to is not None:
        roll_back(state, attempt, report.back_to, report.kind.value)
    ledger = state.progress.ledger.ranges
    state.emit(GuardTrippedEvent(attempt=attempt, trip=report, ledger=ledger))


def roll_back(state: CoreState, attempt: int, step: int, why: str) -> None:
    """Exclude all states after `step` of this and earlier attempts from use, also by a resumed job.
    Their checkpoints in the remote tier go into quarantine."""
    state.progress.roll_back(attempt, step)
    state.saves.keep_only(state.progress.line)
    for checkpoint in sorted(state.saves.remotes.values(), key=lambda checkpoint: checkpoint.step):
        if checkpoint.attempt > attempt or checkpoint.step <= step:
            continue
        if not state.saves.mark_bad(checkpoint.uri):
            continue
        message = f"training was rolled back to step {step}: {why}"
        state.emit(CheckpointBadEvent(step=checkpoint.step, uri=checkpoint.uri, message=message))
        remote_tier.request_cleanup(state, checkpoint.step)
