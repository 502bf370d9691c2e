"""Orders to clean up the remote tier: quarantine of bad checkpoints, then retention.

A cleanup is ordered only after the core has decided whether a new checkpoint is on the present
line, so that retention never counts an unusable checkpoint as the newest good one. Nothing waits
for a cleanup except the end of a job, for a limited time, so that its deletions are recorded.
"""

from __future__ import annotations

from holdfast_service.recovery.core_state.state import CoreState
from holdfast_workers.protocol.commands import TidyRemoteTier


def request_cleanup(state: CoreState, step: int) -> None:
    """Order a cleanup after the checkpoint of `step` was finished or found bad."""
    hosts = state.worlds.present.hosts() if state.worlds.present is not None else set()
    chosen = min(state.roster.live(), key=lambda record: record.agent not in hosts, default=None)
    if chosen is None:
        return
    state.saves.begin_tidying(step)
    state.request(
        TidyRemoteTier(
            chosen.agent,
            state.worlds.attempt,
            step,
            state.saves.unfinished(),
            frozenset(state.saves.bad_uris),
            chosen.incarnation,
            state.progress.line.limits(),
        )
    )


def delays_end(state: CoreState, now: float) -> bool:
    """Whether the end of the job waits for the cleanup. The wait has its own deadline."""
    if state.saves.tidying is None:
        return False
    state.timer.shorten(now + state.config.last_tidy_s)
    return True
