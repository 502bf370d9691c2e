"""The end of a job: it happens once, with a named outcome, and stops every agent."""

from __future__ import annotations

from holdfast_service.job_model.events.attempts import AttemptEndedEvent
from holdfast_service.job_model.events.progress import EndedEvent
from holdfast_service.job_model.lifecycle import STOPPED_EARLY, Phase, StopKind
from holdfast_service.placement.restore_points import RemoteCheckpoint
from holdfast_service.recovery.core_state.effects import End
from holdfast_service.recovery.core_state.stage_timer import WITH_WORLD, Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.upkeep import remote_tier
from holdfast_workers.protocol.commands import Stop

OWN_CHECKPOINTS = "the program's checkpoints on storage are kept, those in memory are not"
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
    at_step = state.progress.committed if step is None else step
    if state.worlds.present is not None and state.timer.stage in WITH_WORLD:
        end_attempt(state, message)
    state.close_incident(now, f"the job ended: {code}", code)
    remote_tier.close_outage(state, now, f"the job ended: {code}")
    state.set_phase(Phase.ENDED)
    state.emit(
        EndedEvent(
            outcome=outcome,
            code=code,
            message=message,
            traceback=traceback,
            step=at_step if at_step or state.knows_step else None,
            durable_step=durable_step,
        )
    )
    for record in state.roster.live():
        state.request(Stop(record.agent, message, record.incarnation))
    state.request(End(outcome, code, message, traceback, at_step))
    state.enter(Stage.ENDED, now, None)
    state.worlds.end_present()


def conclude(state: CoreState, now: float) -> None:
    """The last state is durable: the job succeeded, or it ends early as requested."""
    if state.config.runs_program:
        _conclude_program(state, now)
        return
    step, early = state.ending.end_step, state.ending.early
    if state.ending.last_step < step:
        end_as_stopped(state, now, state.saves.newest(state.progress.line), "")
        return
    code, done = "succeeded", f"all {step} steps are done"
    if early is not None:
        code, done = STOPPED_EARLY, f"stopped early at step {step}: {early.reason},"
    end_job(
        state,
        now,
        outcome="SUCCEEDED",
        code=code,
        message=f"{done} and the last checkpoint is durable",
        step=step,
        durable_step=step,
    )


def _conclude_program(state: CoreState, now: float) -> None:
    """All ranks' programs have ended as they should."""
    if state.ending.stop is not None:
        end_as_stopped(state, now, state.saves.newest(state.progress.line), "")
        return
    if not is_last_step_durable(state):
        return
    step = max(state.progress.committed, state.ending.final_step or 0)
    end_job(
        state,
        now,
        outcome="SUCCEEDED",
        code="succeeded",
        message="the program has ended on all ranks with exit code 0",
        step=step,
    )


def end_as_stopped(
    state: CoreState, now: float, durable: RemoteCheckpoint | None, why: str
) -> None:
    """End as requested; the message states which step is durable."""
    stop = state.ending.stop
    assert stop is not None
    saved = durable.step if durable is not None else 0
    last = max(state.progress.committed, state.ending.final_step or 0, saved)
    if state.config.runs_program:
        kept = OWN_CHECKPOINTS
    elif saved == last:
        kept = f"its last state, step {last}, is in the remote tier" if last else ""
    else:
        newest = f"step {saved} is" if durable is not None else "nothing is"
        kept = f"{newest} in the remote tier, out of {last} computed steps"
        if state.progress.protected > saved:
            kept += f", and step {state.progress.protected} was on two nodes in memory"
    end_job(
        state,
        now,
        outcome=OUTCOME_OF[stop.kind],
        code=OUTCOME_OF[stop.kind].lower(),
        message="; ".join(filter(None, (stop.reason, kept, why))),
        step=saved if stop.kind is StopKind.PAUSE and not state.config.runs_program else last,
        durable_step=durable.step if durable is not None else None,
    )


def fail(
    state: CoreState, now: float, code: str, message: str, traceback: str | None = None
) -> None:
    end_job(state, now, outcome="FAILED", code=code, message=message, traceback=traceback)


def end_attempt(state: CoreState, reason: str) -> None:
    """End the present world; its attempt number is never used again."""
    world = state.worlds.present
    if world is not None:
        has_stepped = world.first_step is not None
        state.emit(
            AttemptEndedEvent(
                attempt=world.attempt,
                reason=reason,
                last_step=state.progress.committed if has_stepped and state.knows_step else None,
                gone=tuple(sorted(world.incarnations() & state.fencing.lapsed)),
                tokens_per_s=state.speeds.of_attempt(world.attempt),
            )
        )
        state.worlds.end_present()


def is_last_step_durable(state: CoreState) -> bool:
    """Whether the job's last state is in the remote tier, on the present line of history. A program
    has no last state but its own: it counts as durable when the program has ended on all ranks."""
    if state.config.runs_program:
        world = state.worlds.present
        return world is not None and all(member.done for member in world.members.values())
    return state.saves.has_final(state.ending.last_step, state.progress.line)
