"""From a verdict to a running world: fence, decide, form, join, first step.

Attempt 1 goes the same way as every recovery. A world is formed at most once per attempt number,
and only of agents that have answered this attempt's fence in their present life.
"""

from __future__ import annotations

from holdfast_service.ranks import Assignment, Home, Shortage, assign
from holdfast_service.recovery import ending
from holdfast_service.recovery.effects import Fence, Form, RemoveAgent, WarmUp
from holdfast_service.recovery.orders import build_world, describe_decision, orders_for
from holdfast_service.recovery.roster import AgentRecord, copies
from holdfast_service.recovery.state import Stage, State, World
from holdfast_service.registry import RestorePoint, Source, find_restore_point
from holdfast_service.reports import EventKind, Phase


def open_attempt(state: State, now: float) -> None:
    """Announce the next attempt to every agent that is there."""
    state.attempt = max(state.attempt, state.roster.highest_attempt()) + 1
    state.saves.drop_incomplete()
    state.waiting_for = ""
    state.update_incident(next_attempt=state.attempt)
    state.tell_incident()
    state.enter(Stage.FENCING, now, state.config.fence_timeout_s)
    state.awaiting = set()
    for record in state.roster.live():
        fence(state, record)
    if not state.awaiting:
        decide(state, now)


def fence(state: State, record: AgentRecord) -> None:
    """Ask one agent to make way for the present attempt, and wait for its answer."""
    state.awaiting.add(record.agent)
    state.ask(Fence(record.agent, state.attempt, record.incarnation))


def give_up_on_silent(state: State, now: float) -> None:
    """The fence's deadline is over: who has not answered is lost, and must not live on."""
    why = f"no answer to the fence of attempt {state.attempt} in {state.config.fence_timeout_s:g} s"
    for agent in sorted(state.awaiting):
        record = state.roster.record(agent)
        if record is not None and record.live:
            state.ask(RemoveAgent(agent, why, record.incarnation))
            if state.last_world is None or agent not in state.last_world.hosts():
                state.emit(EventKind.STANDBY, agent=agent, state="lost")
            state.roster.lose(agent)
            state.saves.release(agent)
            state.note(f"{agent}: {why}")
    state.awaiting = set()
    decide(state, now)


def decide(state: State, now: float) -> None:
    """Everybody who is there has made way: seat the ranks, or wait for who is missing."""
    if state.awaiting and state.stage is Stage.FENCING:
        return
    if state.unproven:
        names = ", ".join(sorted(state.unproven))
        _wait(state, f"proof that the last attempt has stopped on any of {names}", now)
        return
    records = state.roster.fenced(state.attempt)
    config = state.config
    last = state.last_world
    ranks = {
        member.worker: member.rank
        for member in (last.members.values() if last else ())
        if member.worker is not None
    }
    nodes = state.roster.nodes(records, ranks)
    result = assign(config.groups, _homes(state), nodes)
    if isinstance(result, Shortage):
        missing = ", ".join(str(rank) for rank in result.ranks)
        _wait(state, f"node for ranks {missing}", now)
        return
    point = find_restore_point(
        world_size=config.world_size,
        mesh=config.mesh,
        copies=copies(records),
        remotes=state.saves.remotes.values(),
        line=state.line,
        bad=frozenset(state.bad),
        bad_uris=frozenset(state.saves.bad_uris),
    )
    if point.source is Source.REMOTE and point.step >= config.steps:
        ending.succeed(state, now)
        return
    _form(state, result, point, records, now)


def advance(state: State, now: float) -> None:
    """Some rank joined, stepped or finished: go on if that was the last one missing."""
    world = state.world
    if state.stage is not Stage.FORMING or world is None:
        return
    if not all(member.joined or member.done for member in world.members.values()):
        return
    if world.joined_at is None:
        _all_joined(state, world, now)
    all_done = all(member.done for member in world.members.values())
    if world.first_step is not None or all_done:
        run(state, now)


def run(state: State, now: float) -> None:
    """The attempt makes steps: the incident is over."""
    world = state.world
    assert world is not None
    joined_at = world.joined_at if world.joined_at is not None else now
    first = world.first_step if world.first_step is not None else world.restored_step
    state.emit(
        EventKind.ATTEMPT_RUNNING,
        attempt=world.attempt,
        members=[world.members[rank].data() for rank in sorted(world.members)],
        joined={str(r): {"phases_s": m.phases_s} for r, m in sorted(world.members.items())},
        first_step=first,
    )
    state.committed = max(first, world.restored_step)
    state.note_step(world.attempt, state.committed)
    if state.incident is not None:
        state.spent("first_step", (world.first_step_at or now) - joined_at)
        resolution = f"attempt {world.attempt} runs from step {world.restored_step}"
        state.incident = state.incident.closed(now, resolution)
        state.tell_incident(EventKind.INCIDENT_CLOSED)
        state.closed_incident, state.incident = state.incident, None
    state.show(Phase.RUNNING)
    state.enter(Stage.RUNNING, now, None)
    if any(member.done for member in world.members.values()):
        finish(state, now)


def finish(state: State, now: float) -> None:
    """A rank has done the last step. The job ends when all have and the checkpoint is durable."""
    world = state.world
    assert world is not None
    if state.stage is Stage.RUNNING:
        state.show(Phase.FINISHING)
        state.enter(Stage.FINISHING, now, state.config.finish_timeout_s)
    if (
        state.stage is Stage.FINISHING
        and all(member.done for member in world.members.values())
        and ending.is_durable(state)
    ):
        ending.succeed(state, now)


def settle(state: State, world: World) -> None:
    """Remember where each group of ranks sits, and in which life of its agent."""
    for index, group in enumerate(state.config.groups):
        member = world.members[group[0]]
        record = state.roster.record(member.agent)
        domain = record.report.domain if record is not None else ""
        state.homes[index] = Home(member.agent, domain, alive=True)
        state.home_lives[index] = member.incarnation


def welcome(state: State, record: AgentRecord) -> None:
    """An agent that is there but has no rank: fence it if an attempt forms, warm it up else."""
    if state.stage in (Stage.FENCING, Stage.WAITING):
        if state.stage is Stage.WAITING or record.agent not in state.awaiting:
            fence(state, record)  # also if it has answered before: it may have more to offer now
    elif state.stage in (Stage.FORMING, Stage.RUNNING, Stage.FINISHING):
        warm_up(state, record)


def warm_up(state: State, record: AgentRecord) -> None:
    """Let the agent be a standby of the present attempt; nothing older may run on it."""
    if record.fenced != state.attempt and record.report.attempt <= state.attempt:
        state.ask(Fence(record.agent, state.attempt, record.incarnation))
    state.ask(WarmUp(record.agent, state.attempt, record.incarnation))
    ready = record.report.ready
    state.emit(EventKind.STANDBY, agent=record.agent, state="ready" if ready else "warming")


def _homes(state: State) -> dict[int, Home]:
    found: dict[int, Home] = {}
    for index, home in state.homes.items():
        record = state.roster.record(home.agent)
        alive = (
            record is not None
            and record.fenced == state.attempt
            and record.incarnation == state.home_lives[index]
        )
        found[index] = Home(home.agent, home.domain, alive)
    return found


def _wait(state: State, resource: str, now: float) -> None:
    if state.stage is not Stage.WAITING:
        state.spent("fence", now - state.since)
        patience = state.config.wait_for_replacement_s
        if state.waiting_until is not None:
            patience = min(patience, max(0.0, state.waiting_until - now))
            state.waiting_until = None
        state.enter(Stage.WAITING, now, patience)
    if resource != state.waiting_for:
        state.waiting_for = resource
        state.update_incident(decision="wait for a replacement", reason=f"there is no {resource}")
        state.tell_incident()
        state.emit(EventKind.WAITING, resource=resource, until=state.deadline)


def _form(
    state: State,
    result: Assignment,
    point: RestorePoint,
    records: list[AgentRecord],
    now: float,
) -> None:
    state.spent("decide" if state.stage is Stage.WAITING else "fence", now - state.since)
    state.spent("decide", 0.0)
    if point.source is Source.MEMORY:
        state.line = state.line.ran(point.attempt)
    world = build_world(state, result, point, records, now)
    _tell_decision(state, result, point, world)
    _tell_forming(state, world, point, records)
    by_agent = {record.agent: record for record in records}
    for order_agent, order in orders_for(state, world, by_agent):
        state.ask(Form(order_agent, order, by_agent[order_agent].incarnation))
    state.world = world
    state.line = state.line.formed(world.attempt, world.restored_step)
    settle(state, world)
    for record in records:
        if record.agent not in world.hosts():
            warm_up(state, record)
    state.enter(Stage.FORMING, now, state.config.form_timeout_s)


def _tell_decision(state: State, result: Assignment, point: RestorePoint, world: World) -> None:
    decision, reason = describe_decision(state.config, result, world)
    state.update_incident(
        decision=decision,
        reason=reason,
        restored_step=point.step,
        steps_lost=max(0, state.committed - point.step),
        tiers={rank: one.restore.tier.value for rank, one in world.members.items()},
    )
    state.tell_incident()


def _tell_forming(
    state: State, world: World, point: RestorePoint, records: list[AgentRecord]
) -> None:
    members = [world.members[rank] for rank in sorted(world.members)]
    standbys = [record for record in records if record.agent not in world.hosts()]
    state.emit(
        EventKind.ATTEMPT_FORMING,
        attempt=world.attempt,
        mesh=dict(state.config.mesh),
        world_size=state.config.world_size,
        members=[member.data() for member in members],
        standbys=[
            {
                "agent": record.agent,
                "node_id": record.report.node_id,
                "workers": [
                    {"worker": one.worker, "pid": one.pid} for one in record.report.workers
                ],
            }
            for record in standbys
        ],
        restore={
            "step": point.step,
            "attempt": point.attempt,
            "tiers": {str(m.rank): m.restore.tier.value for m in members},
            "sources": {str(m.rank): m.restore.agent or m.restore.uri for m in members},
        },
        cause_incident=state.incident.number if state.incident else None,
    )


def _all_joined(state: State, world: World, now: float) -> None:
    world.joined_at = now
    state.line = state.line.ran(world.attempt)
    restore = max((m.phases_s.get("restore", 0.0) for m in world.members.values()), default=0.0)
    state.spent("form", now - world.formed_at - restore)
    state.spent("restore", restore)
    state.update_incident(joined_attempt=world.attempt)
    state.tell_incident()
    state.deadline = now + state.config.first_step_timeout_s
