"""The progress of a formed attempt: its ranks join, commit their first step, and finish.

Each report of progress is recorded, and the attempt then goes as far as its ranks have come. A
repeated report changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from holdfast_service.job_model.attempt_parts import JoinTimes
from holdfast_service.job_model.events.attempts import (
    AttemptRunningEvent,
    InitialisedFromEvent,
    ProgramAttachedEvent,
    ProgramResumedEvent,
)
from holdfast_service.job_model.events.progress import EndsEarlyEvent
from holdfast_service.job_model.lifecycle import Phase
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.core_state.worlds import AttemptWorld, Member
from holdfast_service.recovery.upkeep import remote_tier, resizing
from holdfast_service.recovery.upkeep.partners import emit_protection
from holdfast_service.recovery.world import outcome
from holdfast_workers.protocol.findings import EarlyStop
from holdfast_workers.protocol.messages import StepRow, Tier
from holdfast_workers.protocol.signals import FirstStep, ProgramAttached, WorkerDone


def record_joined(
    state: CoreState, member: Member, phases_s: Mapping[str, float], now: float
) -> None:
    """Record that a rank of the present world has joined, and how long each phase took."""
    member.record_joined(phases_s)
    advance(state, now)


def record_attached(state: CoreState, attached: ProgramAttached) -> None:
    """Record that a rank's program works with Holdfast. The first rank speaks for all; a higher
    level than before is reported too."""
    world = state.worlds.present
    has_kept = state.has_memory_checkpoints
    state.progress.record_program_level(attached.level)
    if state.has_memory_checkpoints and not has_kept and world is not None and world.is_running:
        emit_protection(state)
    if world is None or not world.record_program_level(attached.level):
        return
    state.emit(
        ProgramAttachedEvent(
            attempt=world.attempt, level=attached.level, integration=attached.integration
        )
    )


def record_committed_step(state: CoreState, attempt: int, step: int, now: float) -> None:
    """Record that a signal or a metric row shows a committed step of the attempt."""
    before = state.progress.committed
    state.progress.record_step(attempt, step)
    world = state.worlds.present
    if world is None or attempt != world.attempt:
        _record_late_step(state, attempt, step)
        return
    if state.config.runs_program and world.first_step is None:
        _record_own_restore(state, world, step, before)
    elif step <= world.restored_step:
        return
    world.record_first_step(step)
    advance(state, now)


def record_first_step(state: CoreState, attempt: int, first: FirstStep, now: float) -> None:
    """Record that the attempt has computed its first step, which may be evaluated before it is
    committed.

    Then `first_step_s` is over, and hangs are found by learned limits. But nothing is won until the
    step is committed: a fault in the evaluation belongs to the same incident, and uses the same
    budgets."""
    world = state.worlds.present
    if first.committed:
        record_committed_step(state, attempt, first.step, now)
    elif world is not None and attempt == world.attempt:
        world.record_computed(now)
        advance(state, now)


def record_rows(state: CoreState, rows: Sequence[StepRow], now: float) -> None:
    """Record which steps a program reports: each, or only some; and its first one, of which a
    page of rows may tell before the signal does."""
    if not state.config.runs_program:
        return
    state.progress.record_reported_steps([(row.attempt, row.step) for row in rows])
    world = state.worlds.present
    if world is not None and world.first_step is None:
        steps = [row.step for row in rows if row.attempt == world.attempt]
        if steps:
            record_committed_step(state, world.attempt, min(steps), now)


def _record_late_step(state: CoreState, attempt: int, step: int) -> None:
    """A step of a program's last attempt may become known only after its end."""
    world, last = state.worlds.present, state.worlds.last
    if not state.config.runs_program or last is None or attempt != last.attempt:
        return
    if world is None or world.first_step is None:
        state.progress.record_late_step(step)


def _record_own_restore(state: CoreState, world: AttemptWorld, step: int, before: int) -> None:
    """The first step that a program reports tells from which step it has gone on, if it is known to
    report each step. `before`: the newest step that was known of the attempts before it."""
    follows = max(0, step - 1)  # nothing comes before step 0
    is_known = bool(state.progress.reports_each)
    restored = follows if is_known or follows == world.restored_step else None
    is_compared = is_known and state.progress.reports_steps
    lost = max(0, before - step + 1) if is_compared else None
    state.progress.record_first_report(world.attempt, step)
    if world.is_adopted:
        return  # this one is only the first since the supervisor has been restarted
    if is_known and not world.is_running:
        state.incidents.amend(restored_step=restored, steps_lost=lost)
        state.emit_incident()
    if is_compared or follows != world.restored_step or world.is_running:
        state.emit(
            ProgramResumedEvent(
                attempt=world.attempt, restored_step=restored, first_step=step, steps_lost=lost
            )
        )


def record_reached_step(state: CoreState, attempt: int, step: int, now: float) -> None:
    """Record the step at which an agent or a rank sees itself. That of a program may be one that it
    has only loaded or kept: its rows show the steps that it reports."""
    if not state.config.runs_program:
        record_committed_step(state, attempt, step, now)
    elif step:
        state.progress.record_step(attempt, step)


def record_done(
    state: CoreState, member: Member, attempt: int, done: WorkerDone, now: float
) -> tuple[Fault, ...]:
    """Record that a rank of the present world is done: `done.step` was its last one."""
    step = done.step
    member.record_done(step)
    state.ending.record_final_step(step)
    if step or not state.config.runs_program:
        state.progress.record_step(attempt, step)
    is_news = record_early_end(state, step, done.early)
    if is_news and state.saves.has_given_up(attempt, step):  # as if it were any step's
        what = f"the checkpoint of step {step}, the job's last one, could not be saved"
        fault = Fault(
            Cause.CHECKPOINT_FAILED, attempt=attempt, at=now, what=what, step=step, certain=False
        )
        return (fault,)
    advance(state, now)
    return ()


def record_early_end(state: CoreState, step: int, early: EarlyStop | None) -> bool:
    """Record that the ranks have ended training after `step`, before the job's last. False if they
    have not, or if it was known."""
    if early is None:
        return False
    event = EndsEarlyEvent(step=step, reason=early.reason)
    is_news = state.ending.end_early(event)
    if is_news:
        state.emit(event)
    return is_news


def record_left(
    state: CoreState, member: Member, attempt: int, step: int, now: float
) -> tuple[Fault, ...]:
    """Record that a rank has left the present world after `step`, so that the mesh can change. Once
    all have, returns the reason to form the next world: it proves no rank's end."""
    world = state.worlds.present
    member.record_left()
    record_reached_step(state, attempt, step, now)
    if world is None or not all(other.left for other in world.members.values()):
        return ()
    if state.departure.fault is not None and state.departure.is_of(attempt):
        return (replace(state.departure.fault, at=now),)
    change = state.mesh_change
    planned = "the ranks left for a planned change of the mesh"  # of a former supervisor
    if state.config.schedule:
        planned = f"the mesh is scheduled to change after step {step}"
    why = change.reason if change.is_under_way(attempt) else planned
    return (resizing.resize_fault(world, why, step, now),)


def advance(state: CoreState, now: float) -> None:
    """Continue as far as the ranks have come: RUNNING when all have joined and one has stepped,
    FINISHING when one is done, and the end of the job when all are done and the last checkpoint is
    durable.

    A program's first step has no limit of its own: its agents watch for silence from the stage
    RUNNING on. If it is known to report steps, its attempt still starts until then, or until
    `program_progress_s` are over: it may have none left to make."""
    world = state.worlds.present
    if world is None:
        return
    members = world.members.values()
    if state.timer.stage is Stage.FORMING and all(m.joined or m.has_stopped for m in members):
        if world.joined_at is None:
            _record_all_joined(state, world, now)
        if state.config.runs_program:
            limit_s = state.config.program_progress_s if state.progress.reports_steps else None
            state.enter(Stage.RUNNING, now, limit_s)
    has_joined = world.joined_at is not None
    if state.timer.stage is Stage.FORMING and has_joined and world.evaluates_first:
        state.enter(Stage.RUNNING, now, None)
    if state.timer.stage in (Stage.FORMING, Stage.RUNNING) and not world.is_running:
        awaits_step = not state.config.runs_program or state.progress.reports_steps
        is_over = all(member.done for member in members)
        has_begun = (
            world.first_step is not None or not awaits_step or is_over or _is_late(state, now)
        )
        if has_joined and has_begun:
            _start_running(state, world, now)
    ends = all if state.config.runs_program else any  # a program's last rank may save for long
    if state.timer.stage is Stage.RUNNING and ends(member.done for member in members):
        state.set_phase(Phase.FINISHING)
        state.enter(Stage.FINISHING, now, state.config.spec.timeouts.finish_s)
    if (
        state.timer.stage is Stage.FINISHING
        and all(member.done for member in members)
        and outcome.is_last_step_durable(state)
        and not remote_tier.delays_end(state, now)
    ):
        outcome.conclude(state, now)


def _is_late(state: CoreState, now: float) -> bool:
    """Whether a program whose ranks have joined was waited for long enough."""
    timer = state.timer
    return timer.stage is Stage.RUNNING and timer.deadline is not None and now >= timer.deadline


def handle_finish_deadline(state: CoreState, now: float) -> None:
    """The ranks or their last checkpoint took too long: end the job."""
    if outcome.is_last_step_durable(state):
        outcome.conclude(state, now)
        return
    if state.config.runs_program:
        why = f"some ranks had not ended {state.config.spec.timeouts.finish_s:g} s after the first"
        outcome.fail(state, now, "program_end", why)
        return
    late = f"the last checkpoint was not durable within {state.config.spec.timeouts.finish_s:g} s"
    late += f": {state.incidents.outage.reason}" if state.incidents.outage is not None else ""
    outcome.fail(state, now, "final_checkpoint", late)


def _record_all_joined(state: CoreState, world: AttemptWorld, now: float) -> None:
    world.record_all_joined(now)
    state.progress.record_run(world.attempt)
    members = world.members.values()
    restores = [m.phases_s["restore"] for m in members if "restore" in m.phases_s]
    state.incidents.end_phase("form", now - max(restores, default=0.0))
    if restores:  # a program loads its state by itself, which nobody measures
        state.incidents.end_phase("restore", now)
    state.incidents.amend(joined_attempt=world.attempt)
    state.emit_incident()
    start = world.members[0].restore
    if start.tier is Tier.INIT and start.uri:
        state.emit(
            InitialisedFromEvent(
                attempt=world.attempt, uri=start.uri, step=start.step, what=start.what.value
            )
        )
    state.timer.postpone(now + state.config.spec.timeouts.first_step_s)


def _start_running(state: CoreState, world: AttemptWorld, now: float) -> None:
    """The attempt commits steps, or runs a program that reports none: close the incident."""
    # The evaluation of the first step is no part of the recovery.
    recovered_at = max(world.computed_at or now, world.joined_at or now)
    world.record_running()
    first = world.first_step if world.first_step is not None else world.restored_step
    is_known = world.first_step is not None or not state.config.runs_program
    members = sorted(world.members.items())
    state.emit(
        AttemptRunningEvent(
            attempt=world.attempt,
            members=tuple(member.seated() for _, member in members),
            joined={rank: JoinTimes(phases_s=member.phases_s) for rank, member in members},
            first_step=first if is_known else None,
        )
    )
    emit_protection(state)
    state.fencing.pardon_all()
    if is_known:
        state.progress.continue_from(world.attempt, max(first, world.restored_step))
    closed = state.close_incident(recovered_at, _resolution(state, world))
    if closed is not None and closed.tiers:
        state.intervals.count_restore(closed.tiers.values())
    state.set_phase(Phase.RUNNING)
    state.enter(Stage.RUNNING, now, None)


def _resolution(state: CoreState, world: AttemptWorld) -> str:
    """What ended the incident."""
    if not state.config.runs_program:
        return f"attempt {world.attempt} runs from step {world.restored_step}"
    if world.first_step is None:
        is_over = all(member.done for member in world.members.values())
        does = "has ended" if is_over else "runs"
        late = f", and has reported no step in {state.config.program_progress_s:g} s"
        late = late if state.progress.reports_steps and not is_over else ""
        return f"the program of attempt {world.attempt} {does} on all ranks{late}"
    return f"the first step seen of attempt {world.attempt} is step {world.first_step}"
