"""How a job ends: once, with a named outcome, and with nothing left running."""

from __future__ import annotations

from holdfast_service.recovery.effects import End, Stop
from holdfast_service.recovery.state import WITH_WORLD, Stage, State
from holdfast_service.reports import EventKind, Phase


def end(
    state: State,
    now: float,
    *,
    outcome: str,
    code: str,
    message: str,
    traceback: str | None = None,
    step: int | None = None,
) -> None:
    """Close what is open, stop every agent, end. Nothing follows, ever."""
    at_step = state.committed if step is None else step
    if state.world is not None and state.stage in WITH_WORLD:
        end_attempt(state, message)
    if state.incident is not None:
        state.incident = state.incident.closed(now, f"the job ended: {code}")
        state.tell_incident(EventKind.INCIDENT_CLOSED)
        state.incident = None
    state.show(Phase.ENDED)
    state.emit(
        EventKind.ENDED,
        outcome=outcome,
        code=code,
        message=message,
        traceback=traceback,
        step=at_step,
    )
    for record in state.roster.live():
        state.ask(Stop(record.agent, message, record.incarnation))
    state.ask(End(outcome, code, message, traceback, at_step))
    state.enter(Stage.ENDED, now, None)
    state.world = None


def succeed(state: State, now: float) -> None:
    """The state after the last step is durable."""
    steps = state.config.steps
    end(
        state,
        now,
        outcome="SUCCEEDED",
        code="succeeded",
        message=f"all {steps} steps are done and the last checkpoint is durable",
        step=steps,
    )


def fail(state: State, now: float, code: str, message: str, traceback: str | None = None) -> None:
    end(state, now, outcome="FAILED", code=code, message=message, traceback=traceback)


def end_attempt(state: State, reason: str) -> None:
    """The world is over; its number never comes back."""
    if state.world is not None:
        state.emit(
            EventKind.ATTEMPT_ENDED,
            attempt=state.world.attempt,
            reason=reason,
            last_step=state.committed,
        )
        state.last_world, state.world = state.world, None


def is_durable(state: State) -> bool:
    """Whether the job's last state is in the remote tier, as part of history."""
    return state.saves.has_final(state.config.steps, state.line)
