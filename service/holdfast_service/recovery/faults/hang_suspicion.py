"""A rank makes no progress: look at all of them from outside, judge, and name who holds them up.

Promises: nothing is torn down before it was looked at; a look has a deadline, and takes no help of
the ranks; evidence that is not plain in itself is looked at twice; a world that makes no step for
`stall_limit_s` (or for longer, where a phase may take longer), and in which every rank stands
beyond its limit, ends, whether a culprit is found or not. What is lost with a supervisor is a look:
the next one looks by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from holdfast_service.diagnosis import hang_culprit
from holdfast_service.diagnosis.hang_culprit import Finding, Look, Verdict
from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.recovery.core_state.effects import Inspect
from holdfast_service.recovery.core_state.inputs import CommandFailed, Inspected
from holdfast_service.recovery.core_state.state import Stage, State, World
from holdfast_service.recovery.faults import judgement
from holdfast_service.recovery.world import attempt_formation
from holdfast_workers.protocol.messages import Inspection


@dataclass
class Suspicion:
    """One case: from the first sign until a step is made, or somebody is accused."""

    attempt: int
    step: int
    """It is over when a later step than this is committed."""
    since: float
    due: float
    """When to look next; while a look is under way, when to judge without those who are missing."""
    pause_s: float
    number: int = 0
    """Of the look under way, or of the last one."""
    looked_at: float = 0.0
    awaiting: set[str] = field(default_factory=set)
    """Agents that are to tell what they see."""
    seen: dict[int, Inspection] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)
    mute: set[str] = field(default_factory=set)
    """Agents that did not answer."""
    before: Look | None = None
    """What a second look is to be compared with."""
    told: bool = False
    heard: bool = False
    """During the look under way another rank was told of: it may have been looked at too early."""


def stalled(state: State, step: int, at: float, now: float) -> None:
    """An agent says that a rank, in `step`, is in its phase for longer than learned."""
    if not _is_watched(state):
        return
    case = _current(state)
    if case is None:
        case = _open(state, step, now)
        case.since = min(at, now)
        _look(state, case, now)
    elif case.awaiting:
        case.heard = True
    else:
        case.due = min(case.due, case.looked_at + state.config.inspect_pause_s)


def look_soon(state: State, now: float) -> None:
    """A living world was taken over: it may have stalled, and have said so to nobody who lives."""
    _open(state, state.committed, now)


def progressed(state: State, attempt: int, step: int, now: float) -> None:
    """A step is known to be committed."""
    if attempt != state.attempt or step <= state.committed:
        return
    state.progress_at = now
    case = _current(state)
    if case is not None and step > case.step:
        state.suspicion = None


def inspected(state: State, given: Inspected, now: float) -> None:
    """An agent tells what it sees of its ranks."""
    case, world = _current(state), state.world
    if case is None or world is None or not _is_awaited(state, case, given):
        return
    for one in given.inspections:
        member = world.members.get(one.beat.rank)
        if member is None or member.done or one.beat.attempt != world.attempt:
            continue
        if member.agent == given.agent:
            case.seen[member.rank] = one
    _answered(state, case, world, given.agent, f"{given.agent} sees no process of it", now)


def failed(state: State, given: CommandFailed, now: float) -> None:
    """An agent could not be asked."""
    case, world = _current(state), state.world
    if case is not None and world is not None and _is_awaited(state, case, given):
        case.mute.add(given.agent)
        _answered(state, case, world, given.agent, f"{given.agent}: {given.why}", now)


def due(state: State) -> float | None:
    """When `tick` is needed."""
    case = _current(state)
    if case is not None:
        return case.due
    return _bound(state) if state.stage is Stage.RUNNING else None


def tick(state: State, now: float) -> None:
    at = due(state)
    if at is None or now < at:
        return
    case, world = _current(state), state.world
    assert world is not None
    if case is None:
        _look(state, _open(state, state.committed, now), now)
    elif case.awaiting:
        why = f"did not answer within {state.config.inspect_timeout_s:g} s"
        case.mute |= case.awaiting
        for agent in sorted(case.awaiting):
            _answered(state, case, world, agent, f"{agent} {why}", now)
    else:
        _look(state, case, now)


def _is_watched(state: State) -> bool:
    stages = (Stage.FORMING, Stage.RUNNING, Stage.FINISHING)
    return state.world is not None and state.stage in stages


def _has_joined(state: State) -> bool:
    """Whether all ranks are there, so that they wait for nobody but each other. Before, only what
    is plain counts."""
    return state.world is not None and state.world.joined_at is not None


def _current(state: State) -> Suspicion | None:
    """The case of the present world, if there is one."""
    case = state.suspicion
    if case is not None and not (_is_watched(state) and case.attempt == state.attempt):
        state.suspicion = case = None
    return case


def _bound(state: State) -> float:
    """Until when the world may go without a step."""
    return max(state.since, state.progress_at) + state.config.stall_limit_s


def _open(state: State, step: int, now: float) -> Suspicion:
    pause_s = state.config.inspect_again_s
    state.suspicion = Suspicion(state.attempt, step, now, due=now + pause_s, pause_s=pause_s)
    return state.suspicion


def _is_awaited(state: State, case: Suspicion, given: Inspected | CommandFailed) -> bool:
    current = state.roster.is_current(given.agent, given.incarnation)
    return current and given.number == case.number and given.agent in case.awaiting


def _look(state: State, case: Suspicion, now: float) -> None:
    """Ask every agent that has ranks."""
    world = state.world
    assert world is not None
    state.looks += 1
    case.number, case.looked_at = state.looks, now
    case.due = now + state.config.inspect_timeout_s
    case.seen, case.silent, case.mute = {}, {}, set()
    case.awaiting = {member.agent for member in world.members.values() if not member.done}
    for agent in sorted(case.awaiting):
        record = state.roster.record(agent)
        if record is not None:
            state.ask(Inspect(agent, world.attempt, case.number, record.incarnation))


def _answered(
    state: State, case: Suspicion, world: World, agent: str, why_unseen: str, now: float
) -> None:
    case.awaiting.discard(agent)
    for member in world.members.values():
        if member.agent == agent and not member.done and member.rank not in case.seen:
            case.silent[member.rank] = why_unseen
    if not case.awaiting:
        _judge(state, case, now)


def _judge(state: State, case: Suspicion, now: float) -> None:
    look = Look(dict(case.seen), dict(case.silent))
    longest_s = max((one.beat.limit_s for one in look.seen.values()), default=0.0)
    late_s = max(0.0, longest_s - state.config.stall_limit_s)
    overdue = state.stage is Stage.RUNNING and now >= _bound(state) + late_s
    verdict = hang_culprit.judge(state.config.mesh, look, case.before, overdue=overdue)
    if verdict.finding is Finding.HANG and verdict.sure:
        _accuse(state, case, verdict, now)
    elif verdict.finding is Finding.HANG and _has_joined(state):
        case.before, case.due = look, now + state.config.inspect_pause_s
    else:
        _wait_on(state, case, verdict, now)


def _wait_on(state: State, case: Suspicion, verdict: Verdict, now: float) -> None:
    """Nothing is wrong, as far as can be seen: said once, and looked at again."""
    late = [one for one in case.seen.values() if one.beat.age_s > one.beat.limit_s]
    past_bound = state.stage is Stage.RUNNING and now >= _bound(state)
    if not (late or case.silent or case.heard or past_bound):
        state.suspicion = None
        return
    case.before = None
    if late and not case.told:
        case.told = True
        state.emit(EventKind.STALLED, attempt=state.attempt, step=case.step, **verdict.data())
    case.due = now + case.pause_s
    if case.heard:
        case.due, case.heard = now + state.config.inspect_pause_s, False
    if state.stage is Stage.RUNNING and not past_bound:
        case.due = min(case.due, _bound(state))
    case.pause_s = min(2 * case.pause_s, state.config.inspect_longest_pause_s)


def _accuse(state: State, case: Suspicion, verdict: Verdict, now: float) -> None:
    """The world is condemned; the fence is to kill those that hold it up, rather than to wait for
    them to leave. An agent that is silent and whose ranks are awaited is as good as lost."""
    world = state.world
    assert world is not None
    state.suspicion = None
    accused = [world.members[rank] for rank in verdict.accused]
    for member in accused:
        if member.worker is not None:
            state.condemned.add(member.worker)
            state.roster.doubt(member.worker)
    ranks = verdict.accused
    agents = sorted({member.agent for member in accused})
    workers = [member.worker for member in accused]
    fault = Fault(
        Cause.HANG,
        attempt=world.attempt,
        at=case.since,
        what=verdict.reason,
        rank=ranks[0] if len(ranks) == 1 else None,
        ranks=ranks if len(ranks) > 1 else (),
        worker=workers[0] if len(workers) == 1 else None,
        agent=agents[0] if len(agents) == 1 else None,
        step=state.committed,
        certain=False,
    )
    judgement.accuse(state, fault, now)
    state.update_incident(
        suspects=tuple(_placed(world, one.data()) for one in verdict.suspects),
        stacks=tuple(one.data() for one in verdict.stacks),
    )
    state.tell_incident()
    for agent in sorted(case.mute.intersection(agents)):
        attempt_formation.drop(
            state, agent, "it does not tell what its ranks do, and others wait for them"
        )


def _placed(world: World, suspect: dict[str, Any]) -> dict[str, Any]:
    """With where the rank is: processes and nodes are what is replaced."""
    member = world.members[suspect["rank"]]
    where = {"agent": member.agent, "node_id": member.node_id, "worker": member.worker}
    return {**suspect, **where}
