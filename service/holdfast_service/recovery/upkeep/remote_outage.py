"""A remote tier that does not take checkpoints: an incident of its own, for which nothing stops.

It is told once, when the first save is refused, and closed when a checkpoint is durable again.
Recoveries have their own incidents, also meanwhile.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.policy.incidents import Incident
from holdfast_service.recovery.core_state.state import State


def noticed(
    state: State, now: float, *, at: float, what: str, step: int, rank: int | None, agent: str
) -> None:
    """A save was refused. What is refused after the first one is no news."""
    if state.outage is not None:
        return
    state.incidents += 1
    fault = Fault(
        Cause.REMOTE_UNAVAILABLE,
        attempt=state.attempt,
        at=at,
        what=what,
        rank=rank,
        agent=agent,
        step=step,
        certain=False,
    )
    state.outage = replace(
        Incident.opened(state.incidents, fault, now),
        decision="train on; the newest state is saved when the remote tier answers",
        reason=what,
    )
    state.emit(EventKind.INCIDENT_OPENED, **state.outage.data())


def over(state: State, now: float, resolution: str) -> None:
    """A checkpoint is durable again, or there will be none any more."""
    if state.outage is not None:
        closed = state.outage.closed(now, resolution)
        state.outage = None
        state.emit(EventKind.INCIDENT_CLOSED, **closed.data())
