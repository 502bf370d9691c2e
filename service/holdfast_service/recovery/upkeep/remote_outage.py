"""Outages of the remote tier: an incident of its own, which never stops training.

The incident opens when the first save is refused and closes when a checkpoint is durable again.
Recoveries in the meantime have their own incidents.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_service.job_model.events.incidents import IncidentClosedEvent, IncidentOpenedEvent
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.policy.incidents import Incident
from holdfast_service.recovery.core_state.state import CoreState


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
    if state.outage is not None:
        return
    state.incidents += 1
    fault = Fault(
        Cause.REMOTE_UNAVAILABLE,
        attempt=state.attempt,
        at=at,
        what=description,
        rank=rank,
        agent=agent,
        step=step,
        certain=False,
    )
    state.outage = replace(
        Incident.opened(state.incidents, fault, now),
        decision="training goes on; the newest state is saved when the remote tier answers",
        reason=description,
    )
    state.emit(IncidentOpenedEvent.of(state.outage))


def close_outage(state: CoreState, now: float, resolution: str) -> None:
    """Close the outage incident: a checkpoint is durable again, or the job has ended."""
    if state.outage is not None:
        closed = state.outage.closed(now, resolution)
        state.outage = None
        state.emit(IncidentClosedEvent.of(closed))
