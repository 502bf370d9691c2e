"""Orders to tidy the remote tier: what is bad goes into quarantine, and retention takes its share.

It is ordered only after it was decided whether a new checkpoint belongs to history, so that
retention never takes one that nobody will use for the newest good one. No order is ever waited
for, but at the end of a job, for a while: what was removed is to be told.
"""

from __future__ import annotations

from holdfast_service.recovery.core_state.effects import TidyRemoteTier
from holdfast_service.recovery.core_state.state import State


def begin(state: State, step: int) -> None:
    """Let an agent tidy now that the checkpoint of `step` is finished, or was found bad."""
    hosts = state.world.hosts() if state.world is not None else set()
    chosen = min(state.roster.live(), key=lambda one: one.agent not in hosts, default=None)
    if chosen is None:
        return
    state.saves.tidying = step
    state.ask(
        TidyRemoteTier(
            chosen.agent,
            state.attempt,
            step,
            state.saves.unfinished(),
            frozenset(state.saves.bad_uris),
            chosen.incarnation,
        )
    )


def holds_up(state: State, now: float) -> bool:
    """Whether the end of the job waits for it; that has a deadline of its own."""
    if state.saves.tidying is None:
        return False
    until = now + state.config.last_tidy_s
    state.deadline = until if state.deadline is None else min(state.deadline, until)
    return True
