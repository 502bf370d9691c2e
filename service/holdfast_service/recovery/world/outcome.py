"""The end of a job: it happens once, with a named outcome, and stops every agent."""

from __future__ import annotations

from holdfast_service.job_model.events.attempts import AttemptEndedEvent
from holdfast_service.job_model.events.incidents import IncidentClosedEvent
from holdfast_service.job_model.events.progress import EndedEvent
from holdfast_service.job_model.lifecycle import Phase, StopKind
from holdfast_service.placement.restore_points import RemoteCheckpoint
from holdfast_service.recovery.core_state.effects import End, Stop
from holdfast_service.recovery.core_state.state import WITH_WORLD, CoreState, Stage
from holdfast_service.recovery.upkeep import remote_outage

OUTCOME_OF = {StopKind.CANCEL: "CANCELLED", StopKind.PAUSE: "PAUSED"}


def end_job(
    state: CoreState,
    now: float,
    *,
    outcome: str,
    code: str,
    message: str,
    traceback: str | None = None,
    step: int | None = None,
    durable_step: int | None = None,
) -> None:
    """Close open incidents, stop every agent, and end the job. No effect follows."""
    at_step = state.committed if step is None else step
    if state.world is not None and state.stage in WITH_WORLD:
        end_attempt(state, message)
    if state.incident is not None:
        state.incident = state.incident.closed(now, f"the job ended: {code}")
        state.emit_incident(IncidentClosedEvent)
        state.incident = None
    remote_outage.close_outage(state, now, f"the job ended: {code}")
    state.set_phase(Phase.ENDED)
    state.emit(
        EndedEvent(
            outcome=outcome,
            code=code,
            message=message,
            traceback=traceback,
            step=at_step,
            durable_step=durable_step,
        )
    )
    for record in state.roster.live():
        state.request(Stop(record.agent, message, record.incarnation))
    state.request(End(outcome, code, message, traceback, at_step))
    state.enter_stage(Stage.ENDED, now, None)
    state.world = None


def conclude(state: CoreState, now: float) -> None:
    """The last state is durable: the job succeeded, or it ends early as requested."""
    steps = state.config.steps
    if last_step(state) < steps:
        end_as_stopped(state, now, state.saves.newest(state.line), "")
        return
    end_job(
        state,
        now,
        outcome="SUCCEEDED",
        code="succeeded",
        message=f"all {steps} steps are done and the last checkpoint is durable",
        step=steps,
        durable_step=steps,
    )


def end_as_stopped(
    state: CoreState, now: float, durable: RemoteCheckpoint | None, why: str
) -> None:
    """End as requested; the message states which step is durable."""
    stop = state.stop
    assert stop is not None
    saved = durable.step if durable is not None else 0
    last = max(state.committed, state.final_step or 0, saved)
    if saved == last:
        kept = f"its last state, step {last}, is in the remote tier" if last else ""
    else:
        newest = f"step {saved} is" if durable is not None else "nothing is"
        kept = f"{newest} in the remote tier, out of {last} computed steps"
        if state.protected > saved:
            kept += f", and step {state.protected} was on two nodes in memory"
    end_job(
        state,
        now,
        outcome=OUTCOME_OF[stop.kind],
        code=OUTCOME_OF[stop.kind].lower(),
        message="; ".join(filter(None, (stop.reason, kept, why))),
        step=saved if stop.kind is StopKind.PAUSE else last,
        durable_step=durable.step if durable is not None else None,
    )


def fail(
    state: CoreState, now: float, code: str, message: str, traceback: str | None = None
) -> None:
    end_job(state, now, outcome="FAILED", code=code, message=message, traceback=traceback)


def end_attempt(state: CoreState, reason: str) -> None:
    """End the present world; its attempt number is never used again."""
    if state.world is not None:
        state.emit(
            AttemptEndedEvent(
                attempt=state.world.attempt,
                reason=reason,
                last_step=state.committed,
                gone=tuple(sorted(state.world.incarnations() & state.lapsed)),
            )
        )
        state.last_world, state.world = state.world, None


def last_step(state: CoreState) -> int:
    return state.config.steps if state.final_step is None else state.final_step


def is_last_step_durable(state: CoreState) -> bool:
    """Whether the job's last state is in the remote tier, on the present line."""
    return state.saves.has_final(last_step(state), state.line)
