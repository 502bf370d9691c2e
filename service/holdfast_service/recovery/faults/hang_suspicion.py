"""Hangs: inspect all ranks from outside, judge the evidence, and name the rank that blocks others.

Invariants:

- No world is ended without an inspection.
- An inspection has a deadline and needs no help of the ranks.
- Evidence that is not conclusive by itself is confirmed by a second inspection.
- A world that commits no step for `stall_limit_s` (or longer, if a phase declares a longer limit)
  and in which every rank exceeds its limit is ended, whether a culprit is found or not.
- A supervisor restart loses only the inspection under way: its successor starts one by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast_service.diagnosis import hang_culprit
from holdfast_service.diagnosis.hang_culprit import (
    HangFinding,
    HangVerdict,
    Suspect,
    WorldObservation,
)
from holdfast_service.job_model.events.health import StalledEvent
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.policy.incident_parts import SharedStack, SuspectedRank
from holdfast_service.recovery.core_state.hang_watch import HangSuspicion
from holdfast_service.recovery.core_state.inputs import CommandFailed, Inspected
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.core_state.worlds import AttemptWorld
from holdfast_service.recovery.faults import judgement
from holdfast_service.recovery.world import attempt_formation
from holdfast_workers.protocol.commands import Inspect
from holdfast_workers.protocol.messages import (
    BUSY_PHASE,
    JOINING_PHASE,
    PROGRAM_PHASE,
    Inspection,
)


def handle_rank_stalled(state: CoreState, step: int, at: float, now: float) -> None:
    """An agent reports that a rank, in `step`, exceeds the learned duration of its phase."""
    if not _is_watched(state):
        return
    suspicion = _current_suspicion(state)
    if suspicion is None:
        suspicion = _open_suspicion(state, step, now, since=min(at, now))
        _start_inspection(state, suspicion, now)
    else:
        suspicion.record_stall(state.config.inspect_pause_s)


def inspect_soon(state: CoreState, now: float) -> None:
    """Inspect an adopted world soon: it may have reported a stall only to the former supervisor."""
    _open_suspicion(state, state.progress.committed, now, since=now)


def record_progress(state: CoreState, attempt: int, step: int, now: float) -> None:
    """Record a committed step; it ends the suspicion of an earlier step."""
    if attempt != state.worlds.attempt or step <= state.progress.committed:
        return
    state.hangs.record_progress(now)
    suspicion = state.hangs.suspicion
    if suspicion is not None and step > suspicion.step:
        state.hangs.end()


def handle_inspected(state: CoreState, event: Inspected, now: float) -> None:
    """Record an agent's inspection of its ranks."""
    suspicion, world = _current_suspicion(state), state.worlds.present
    if suspicion is None or world is None or not _is_awaited(state, suspicion, event):
        return
    seen = {
        member.rank: inspection
        for inspection in event.inspections
        for member in [world.members.get(inspection.beat.rank)]
        if member is not None and not member.has_stopped and member.agent == event.agent
        if inspection.beat.attempt == world.attempt
    }
    why_unseen = f"agent {event.agent} has no process of this rank"
    _record_answer(state, suspicion, world, event.agent, seen, why_unseen, now)


def handle_inspect_failed(state: CoreState, event: CommandFailed, now: float) -> None:
    """Record that an agent could not be inspected."""
    suspicion, world = _current_suspicion(state), state.worlds.present
    if suspicion is not None and world is not None and _is_awaited(state, suspicion, event):
        suspicion.record_unanswered({event.agent})
        why_unseen = f"agent {event.agent} failed to inspect it: {event.why}"
        _record_answer(state, suspicion, world, event.agent, {}, why_unseen, now)


def next_due(state: CoreState) -> float | None:
    """The time at which `handle_tick` must be called."""
    suspicion = _current_suspicion(state)
    if suspicion is not None:
        return suspicion.due
    return _stall_deadline(state) if state.timer.stage is Stage.RUNNING else None


def handle_tick(state: CoreState, now: float) -> None:
    """Start an inspection, or judge the present one, when it is due."""
    due = next_due(state)
    if due is None or now < due:
        return
    suspicion, world = _current_suspicion(state), state.worlds.present
    assert world is not None
    if suspicion is None and not _reports_steps(state):
        state.hangs.record_progress(now)  # only its agents know whether it is at work
    elif suspicion is None:
        suspicion = _open_suspicion(state, state.progress.committed, now, since=now)
        _start_inspection(state, suspicion, now)
    elif suspicion.awaiting:
        why = f"did not answer within {state.config.inspect_timeout_s:g} s"
        suspicion.record_unanswered(suspicion.awaiting)
        for agent in sorted(suspicion.awaiting):
            _record_answer(state, suspicion, world, agent, {}, f"agent {agent} {why}", now)
    else:
        _start_inspection(state, suspicion, now)


def _is_watched(state: CoreState) -> bool:
    stages = (Stage.FORMING, Stage.RUNNING, Stage.FINISHING)
    return state.worlds.present is not None and state.timer.stage in stages


def _all_joined(state: CoreState) -> bool:
    """Whether all ranks have joined and so wait only for each other. Before that, only conclusive
    evidence counts, and that a rank has not begun its order."""
    return state.worlds.present is not None and state.worlds.present.joined_at is not None


def _current_suspicion(state: CoreState) -> HangSuspicion | None:
    """The suspicion of the present world, if there is one."""
    suspicion = state.hangs.suspicion
    if suspicion is not None and not (
        _is_watched(state) and suspicion.attempt == state.worlds.attempt
    ):
        state.hangs.end()
        return None
    return suspicion


def _reports_steps(state: CoreState) -> bool:
    """Whether the world reports steps. A program may report none: its agents report a rank that
    has neither printed nor computed for the time that the user gave."""
    world = state.worlds.present
    return not state.config.runs_program or (world is not None and world.first_step is not None)


def _stall_deadline(state: CoreState) -> float:
    """The time until which the world may go without a step."""
    limit_s = state.config.spec.detection.stall_limit_s
    return max(state.timer.since, state.hangs.progress_at) + limit_s


def _open_suspicion(state: CoreState, step: int, now: float, *, since: float) -> HangSuspicion:
    pause_s = state.config.inspect_again_s
    return state.hangs.open(state.worlds.attempt, step, now, pause_s, since)


def _is_awaited(
    state: CoreState, suspicion: HangSuspicion, event: Inspected | CommandFailed
) -> bool:
    current = state.roster.is_current(event.agent, event.incarnation)
    return current and event.number == suspicion.number and event.agent in suspicion.awaiting


def _start_inspection(state: CoreState, suspicion: HangSuspicion, now: float) -> None:
    """Request an inspection from every agent that hosts ranks."""
    world = state.worlds.present
    assert world is not None
    suspicion.begin_inspection(
        state.hangs.next_number(),
        frozenset(member.agent for member in world.members.values() if not member.has_stopped),
        now,
        state.config.inspect_timeout_s,
    )
    for agent in sorted(suspicion.awaiting):
        record = state.roster.find(agent)
        if record is not None:
            state.request(Inspect(agent, world.attempt, suspicion.number, record.incarnation))


def _record_answer(
    state: CoreState,
    suspicion: HangSuspicion,
    world: AttemptWorld,
    agent: str,
    seen: Mapping[int, Inspection],
    why_unseen: str,
    now: float,
) -> None:
    members = world.members.values()
    ranks = [member.rank for member in members if member.agent == agent and not member.has_stopped]
    if suspicion.record_answer(agent, ranks, seen, why_unseen):
        _judge_inspection(state, suspicion, now)


def _judge_inspection(state: CoreState, suspicion: HangSuspicion, now: float) -> None:
    look = WorldObservation(dict(suspicion.seen), dict(suspicion.silent), state.ended_ranks())
    longest_s = max((inspection.beat.limit_s for inspection in look.seen.values()), default=0.0)
    late_s = max(0.0, longest_s - state.config.spec.detection.stall_limit_s)
    by_steps = _is_silent_by_steps(state, look, now)
    overdue = state.timer.stage is Stage.RUNNING and (
        by_steps or not _reports_steps(state) or now >= _stall_deadline(state) + late_s
    )
    verdict = hang_culprit.judge(
        state.worlds.shape.mesh,
        look,
        suspicion.before,
        overdue=overdue,
        without_limits=by_steps,
    )
    if verdict.finding is HangFinding.HANG and verdict.sure:
        _report_hang(state, suspicion, verdict, now)
    elif verdict.finding is HangFinding.HANG and (
        _all_joined(state) or _have_not_begun(look, verdict.accused)
    ):
        suspicion.confirm_with_another(look, now + state.config.inspect_pause_s)
    else:
        _keep_watching(state, suspicion, verdict, now)


def _is_silent_by_steps(state: CoreState, look: WorldObservation, now: float) -> bool:
    """Whether a program whose steps are read from its output has shown none for too long, and its
    ranks do no more than compute."""
    beats = [inspection.beat for inspection in look.seen.values()]
    is_running = state.timer.stage is Stage.RUNNING and _reports_steps(state)
    if not (beats and is_running and now >= _stall_deadline(state)):
        return False
    return all(
        beat.phase == BUSY_PHASE or (beat.phase == PROGRAM_PHASE and beat.age_s > beat.limit_s)
        for beat in beats
    )


def _have_not_begun(look: WorldObservation, ranks: Collection[int]) -> bool:
    """Whether all these ranks should have begun to carry out their orders: they wait for nobody."""
    return bool(ranks) and all(
        rank in look.seen and look.seen[rank].beat.phase == JOINING_PHASE for rank in ranks
    )


def _keep_watching(
    state: CoreState, suspicion: HangSuspicion, verdict: HangVerdict, now: float
) -> None:
    """Emit STALLED once, as no hang is proven, and schedule the next inspection."""
    late = [
        inspection
        for inspection in suspicion.seen.values()
        if inspection.beat.age_s > inspection.beat.limit_s
    ]
    is_running = state.timer.stage is Stage.RUNNING and _reports_steps(state)
    past_bound = is_running and now >= _stall_deadline(state)
    if not (late or suspicion.silent or suspicion.stall_reported or past_bound):
        state.hangs.end()
        return
    if late and suspicion.record_stall_event():
        state.emit(
            StalledEvent(
                attempt=state.worlds.attempt,
                step=suspicion.step,
                finding=verdict.finding,
                reason=verdict.reason,
                accused=verdict.accused,
                suspects=verdict.suspects,
                stacks=verdict.stacks,
            )
        )
    is_bounded = is_running and not past_bound
    suspicion.watch_on(
        now,
        pause_s=state.config.inspect_pause_s,
        longest_pause_s=state.config.inspect_longest_pause_s,
        bound=_stall_deadline(state) if is_bounded else None,
    )


def _report_hang(
    state: CoreState, suspicion: HangSuspicion, verdict: HangVerdict, now: float
) -> None:
    """Condemn the world. The fence kills the workers that block it instead of waiting for them to
    leave. An agent that did not answer and whose ranks block others counts as lost."""
    world = state.worlds.present
    assert world is not None
    state.hangs.end()
    accused = [world.members[rank] for rank in verdict.accused]
    for member in accused:
        if member.worker is not None and not member.done:
            state.fencing.condemn(member.worker)
            state.roster.exclude_worker(member.worker)
    ranks = verdict.accused
    agents = sorted({member.agent for member in accused})
    workers = [member.worker for member in accused]
    fault = Fault(
        Cause.HANG,
        attempt=world.attempt,
        at=suspicion.since,
        what=verdict.reason,
        rank=ranks[0] if len(ranks) == 1 else None,
        ranks=ranks if len(ranks) > 1 else (),
        worker=workers[0] if len(workers) == 1 else None,
        agent=agents[0] if len(agents) == 1 else None,
        step=state.progress.committed,
        certain=False,
    )
    if accused and all(member.done for member in accused):  # no node is to blame
        fault = judgement.early_end_fault(state, ranks, verdict.reason, suspicion.since)
    judgement.report_fault(state, fault, now)
    if state.timer.stage is Stage.ENDED:
        return
    before = state.incidents.current  # it may have those of a hang of an earlier attempt
    state.incidents.amend(
        suspects=(
            *(before.suspects if before is not None else ()),
            *(_located(world, suspect) for suspect in verdict.suspects),
        ),
        stacks=(
            *(before.stacks if before is not None else ()),
            *(SharedStack(stack.ranks, stack.frames) for stack in verdict.stacks),
        ),
    )
    state.emit_incident()
    for agent in sorted(suspicion.unanswered.intersection(agents)):
        attempt_formation.drop_agent(
            state, agent, "it did not answer the inspection, and other ranks wait for its ranks"
        )


def _located(world: AttemptWorld, suspect: Suspect) -> SuspectedRank:
    """`suspect` with its place at present."""
    member = world.members[suspect.rank]
    return SuspectedRank(
        suspect.rank, suspect.score, suspect.reasons, member.agent, member.node_id, member.worker
    )
