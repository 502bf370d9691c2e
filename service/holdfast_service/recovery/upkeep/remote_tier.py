"""The remote tier while a job runs: its outages, and orders to clean it up.

An outage is an incident of its own, which never stops training. It opens when the first save is
refused and closes when a checkpoint is durable again. Recoveries in the meantime have their own
incidents.

A cleanup is the quarantine of bad checkpoints, then retention. It is ordered only after the core
has decided whether a new checkpoint is on the present line, so that retention never counts an
unusable checkpoint as the newest good one. Nothing waits for a cleanup except the end of a job, for
a limited time, so that its deletions are recorded.
"""

from __future__ import annotations

from holdfast_service.job_model.events.incidents import IncidentClosedEvent, IncidentOpenedEvent
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_workers.protocol.commands import TidyRemoteTier
from holdfast_workers.protocol.signals import ShardDelayed, Signal


def handle_delayed_shard(
    state: CoreState, signal: Signal, delayed: ShardDelayed, now: float
) -> None:
    """The remote tier refused a shard; the agent retries."""
    place, step = f"rank {signal.rank} on {signal.agent}", delayed.step
    open_outage(
        state,
        now,
        at=signal.at,
        description=f"{place} cannot save step {step}: {delayed.message}",
        step=step,
        rank=signal.rank,
        agent=signal.agent,
    )


def open_outage(
    state: CoreState,
    now: float,
    *,
    at: float,
    description: str,
    step: int,
    rank: int | None,
    agent: str,
) -> None:
    """Open the outage incident after a refused save; later refusals change nothing."""
    fault = Fault(
        Cause.REMOTE_UNAVAILABLE,
        attempt=state.worlds.attempt,
        at=at,
        what=description,
        rank=rank,
        agent=agent,
        step=step,
        certain=False,
    )
    decision = "train on, and to save the newest state when the remote tier answers"
    opened = state.incidents.open_outage(fault, decision, now, state.level)
    if opened is not None:
        state.emit(IncidentOpenedEvent.of(opened))


def close_outage(state: CoreState, now: float, resolution: str) -> None:
    """Close the outage incident: a checkpoint is durable again, or the job has ended."""
    closed = state.incidents.close_outage(now, resolution)
    if closed is not None:
        state.emit(IncidentClosedEvent.of(closed))


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
