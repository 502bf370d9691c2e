"""From a verdict to a running world: fence, decide, form, join, first step.

Attempt 1 goes the same way as every recovery. A world is formed at most once per attempt number,
and only of agents that have answered this attempt's fence in their present life.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from holdfast_service.job_model.supervisor_protocol import EventKind, Phase
from holdfast_service.placement.rank_assignment import Assignment, Home, Shortage, assign, listed
from holdfast_service.placement.restore_points import RestorePoint, Source, find_restore_point
from holdfast_service.placement.tier_inventory import Holding, holdings, restorable, why_not_newer
from holdfast_service.policy.causes import Cause
from holdfast_service.policy.decision_ladder import Action, Decision, carried_out
from holdfast_service.recovery.core_state.effects import Fence, Form, RemoveAgent, WarmUp
from holdfast_service.recovery.core_state.roster import AgentRecord, copies
from holdfast_service.recovery.core_state.state import Stage, State, World
from holdfast_service.recovery.nodes import situation
from holdfast_service.recovery.upkeep import remote_cleanup_orders, save_intervals, shard_rescue
from holdfast_service.recovery.upkeep.partners import tell_protection
from holdfast_service.recovery.world import outcome, stop_proof
from holdfast_service.recovery.world.attempt_orders import build_world, orders_for, seating
from holdfast_workers.protocol.messages import Restore, Tier

FOUND_TOLD = 8
"""Of the states found in all tiers, so many are told with an attempt, newest first."""


def open_attempt(state: State, now: float) -> None:
    """Announce the next attempt to every agent that is there."""
    state.attempt = max(state.attempt, state.roster.highest_attempt()) + 1
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
    last = state.last_world.members.values() if state.last_world is not None else ()
    condemned = {one.worker for one in last if one.worker and one.agent == record.agent}
    condemned &= state.condemned
    state.ask(Fence(record.agent, state.attempt, record.incarnation, tuple(sorted(condemned))))


def give_up_on_silent(state: State, now: float) -> None:
    """The fence's deadline is over: who has not answered is lost, and must not live on."""
    why = f"no answer to the fence of attempt {state.attempt} in {state.config.fence_timeout_s:g} s"
    for agent in sorted(state.awaiting):
        record = state.roster.record(agent)
        if record is not None and record.live:
            if state.last_world is None or agent not in state.last_world.hosts():
                state.emit(EventKind.STANDBY, agent=agent, state="lost")
            drop(state, agent, why)
    state.awaiting = set()
    decide(state, now)


def drop(state: State, agent: str, why: str) -> None:
    """The agent is as good as lost, and must not live on."""
    record = state.roster.record(agent)
    if record is None or not record.live:
        return
    state.ask(RemoveAgent(agent, why, record.incarnation))
    state.roster.lose(agent)
    state.saves.release(agent)
    state.note(f"{agent}: {why}")


def decide(state: State, now: float) -> None:
    """Everybody who is there has made way: seat the ranks, or wait for who is missing."""
    if state.awaiting and state.stage is Stage.FENCING:
        return
    if stop_proof.is_missing(state):
        names = ", ".join(sorted(agent for agent, _ in state.unproven))
        every = "each" if state.config.lease_s else "any"
        _wait(state, f"proof that the last attempt has stopped on {every} of {names}", now)
        return
    records = state.roster.fenced(state.attempt)
    shard_rescue.save_for_the_lost(state, records)
    config = state.config
    last = state.last_world
    ranks = {
        member.worker: member.rank
        for member in (last.members.values() if last else ())
        if member.worker is not None
    }
    nodes = situation.places(state, records, ranks, now)
    result = assign(config.groups, _homes(state), nodes)
    if outcome.is_durable(state) and (isinstance(result, Shortage) or _has_told_its_end(state)):
        outcome.conclude(state, now)
        return
    if isinstance(result, Shortage):
        _wait(state, f"node for {listed(result.ranks)}", now)
        return
    known = _known(state, records)
    point = _restore_point(state, known)
    if point.source is not Source.MEMORY and not state.saves.known:
        why = f" ({state.saves.problem})" if state.saves.problem else ""
        _wait(state, f"answer of the remote tier, which may hold what memory has not{why}", now)
        return
    if point.source is Source.INIT and _was_not_finite(state):
        why = (
            "from every saved state that was left the next step was not finite: the states are as "
            f"they were computed, so look at data and learning rate about step {state.committed}"
        )
        outcome.fail(state, now, "not_finite", why)
        return
    _form(state, result, point, holdings(config.mesh, **known), records, now)


def _has_told_its_end(state: State) -> bool:
    """All is saved, and one more attempt would tell nothing new: a stop was asked for, or one has
    stood on the last step already, to tell the digest of its state."""
    last = state.last_world
    return state.stop is not None or (last is not None and last.restored_step >= state.config.steps)


def _restore_point(state: State, known: dict[str, Any]) -> RestorePoint:
    """What is doubted comes after everything else that is saved."""
    config = state.config
    find = partial(
        find_restore_point,
        world_size=config.world_size,
        mesh=config.mesh,
        beginning=config.beginning,
    )
    point = find(**{**known, "bad": known["bad"] | state.doubted})
    return point if point.source is not Source.INIT else find(**known)


def _was_not_finite(state: State) -> bool:
    faults = state.incident.faults if state.incident is not None else ()
    return any(fault.cause is Cause.NOT_FINITE for fault in faults)


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
    tell_protection(state)
    state.condemned = set()
    state.committed = max(first, world.restored_step)
    state.note_step(world.attempt, state.committed)
    if state.incident is not None:
        state.spent("first_step", (world.first_step_at or now) - joined_at)
        resolution = f"attempt {world.attempt} runs from step {world.restored_step}"
        state.incident = state.incident.closed(now, resolution)
        state.tell_incident(EventKind.INCIDENT_CLOSED)
        state.closed_incident, state.incident = state.incident, None
        save_intervals.recovered(state, [member.restore.tier for member in world.members.values()])
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
        and outcome.is_durable(state)
        and not remote_cleanup_orders.holds_up(state, now)
    ):
        outcome.conclude(state, now)


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
        if state.last_world is None and state.committed == 0:
            patience = max(patience, state.start_deadline - now)  # it starts: nobody is replaced
        if state.waiting_until is not None:
            patience = min(patience, max(0.0, state.waiting_until - now))
            state.waiting_until = None
        if state.unproven:
            patience = max(patience, state.config.lapse_s or 0.0)  # when it will be proven
        state.enter(Stage.WAITING, now, patience)
    if resource != state.waiting_for:
        state.waiting_for = resource
        state.update_incident(decision=Action.WAIT.value, reason=f"there is no {resource}")
        state.tell_incident()
        state.emit(EventKind.WAITING, resource=resource, until=state.deadline)


def _known(state: State, records: list[AgentRecord]) -> dict[str, Any]:
    """All that there is to go on from."""
    return {
        "copies": copies(records),
        "remotes": state.saves.remotes.values(),
        "line": state.line,
        "bad": frozenset(state.bad),
        "bad_uris": frozenset(state.saves.bad_uris),
    }


def _form(
    state: State,
    result: Assignment,
    point: RestorePoint,
    found: list[Holding],
    records: list[AgentRecord],
    now: float,
) -> None:
    state.spent("decide" if state.stage is Stage.WAITING else "fence", now - state.since)
    state.spent("decide", 0.0)
    if point.source in (Source.MEMORY, Source.RESHARD):
        state.line = state.line.ran(point.attempt)
    world = build_world(state, result, point, records, now)
    decision = carried_out(state.judged, seating(state, result, world))
    _tell_decision(state, decision, point, world, why_not_newer(found, point.step))
    _tell_forming(state, world, point, found, records)
    by_agent = {record.agent: record for record in records}
    for order_agent, order in orders_for(state, world, by_agent):
        state.ask(Form(order_agent, order, by_agent[order_agent].incarnation))
    state.world = world
    state.waiting_until = None  # what is waited for from now on, is waited for anew
    if state.line.begins_elsewhere(world.restored_step):
        state.floor = world.restored_step
    state.line = state.line.formed(world.attempt, world.restored_step)
    state.saves.keep_only(state.line)
    settle(state, world)
    for record in records:
        if record.agent not in world.hosts():
            warm_up(state, record)
    state.enter(Stage.FORMING, now, state.config.form_timeout_s)


def _tell_decision(
    state: State, decision: Decision, point: RestorePoint, world: World, not_newer: str
) -> None:
    reason = decision.reason
    if decision.refused:  # else a former supervisor judged it, and the incident has its reasons
        state.update_incident(refused=tuple(one.data() for one in decision.refused))
    state.update_incident(
        decision=decision.action.value,
        reason=f"{reason}; {not_newer}" if not_newer else reason,
        restored_step=point.step,
        steps_lost=max(0, state.committed - point.step),
        tiers={rank: one.restore.tier.value for rank, one in world.members.items()},
    )
    state.tell_incident()


def _tell_forming(
    state: State,
    world: World,
    point: RestorePoint,
    found: list[Holding],
    records: list[AgentRecord],
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
                "host": record.report.host,
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
            "sources": {str(m.rank): _whence(m.restore) for m in members},
            "newest": {tier.value: one.step for tier, one in restorable(found).items()},
            "found": [one.data() for one in found[:FOUND_TOLD]],
        },
        cause_incident=state.incident.number if state.incident else None,
    )


def _whence(restore: Restore) -> str:
    agents = sorted({one.agent for one in restore.origins})
    return restore.agent or restore.uri or ", ".join(agents)


def _all_joined(state: State, world: World, now: float) -> None:
    world.joined_at = now
    state.line = state.line.ran(world.attempt)
    restore = max((m.phases_s.get("restore", 0.0) for m in world.members.values()), default=0.0)
    state.spent("form", now - world.formed_at - restore)
    state.spent("restore", restore)
    state.update_incident(joined_attempt=world.attempt)
    state.tell_incident()
    start = world.members[0].restore
    if start.tier is Tier.INIT and start.uri:
        state.emit(
            EventKind.INITIALISED_FROM,
            attempt=world.attempt,
            uri=start.uri,
            step=start.step,
            what=start.what.value,
        )
    state.deadline = now + state.config.first_step_timeout_s
