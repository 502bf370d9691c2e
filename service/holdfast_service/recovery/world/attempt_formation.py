"""Formation of an attempt: fence, choose seats and state, send the orders.

Attempt 1 is formed in the same way as every recovery. A world is formed at most once per attempt
number, and only of agents that have answered this attempt's fence in their present incarnation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from holdfast_service.job_model.attempt_parts import FoundState, SpareWorker, StandbyAgent
from holdfast_service.job_model.events.attempts import (
    AttemptFormingEvent,
    RestorePlan,
    StandbyEvent,
)
from holdfast_service.job_model.events.progress import WaitingEvent
from holdfast_service.placement.rank_assignment import Shortage, format_ranks
from holdfast_service.placement.restore_points import (
    RestorePoint,
    RestoreSource,
    find_restore_point,
)
from holdfast_service.placement.tier_inventory import (
    Holding,
    holdings,
    newest_restorable,
    why_not_newer,
)
from holdfast_service.placement.world_shape import ShapedAssignment, WorldShape
from holdfast_service.policy.causes import Cause
from holdfast_service.policy.decision_ladder import Action, Decision, applied_decision
from holdfast_service.recovery.core_state.effects import RemoveAgent
from holdfast_service.recovery.core_state.incident_log import IncidentLog
from holdfast_service.recovery.core_state.roster import AgentRecord, copies
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.core_state.worlds import AttemptWorld
from holdfast_service.recovery.nodes import node_eligibility, shape_selection
from holdfast_service.recovery.upkeep import shard_rescue, token_caches
from holdfast_service.recovery.world import outcome, requeue
from holdfast_service.recovery.world.attempt_orders import (
    build_world,
    form_orders,
    seating,
    store_agent,
)
from holdfast_workers.protocol.commands import Fence, Form
from holdfast_workers.protocol.messages import Restore

MAX_FOUND_REPORTED = 8
"""Number of the states found in all tiers that the event of an attempt lists, newest first."""


IN_MEMORY = (RestoreSource.MEMORY, RestoreSource.RESHARD)


def open_attempt(state: CoreState, now: float) -> None:
    """Announce the next attempt to every live agent; `form_if_ready` forms it."""
    attempt = state.worlds.announce_attempt(state.roster.highest_attempt())
    state.timer.forget_resource()
    state.enter(Stage.FENCING, now, state.config.fence_timeout_s)
    state.incidents.amend(next_attempt=attempt)
    state.emit_incident()
    state.fencing.expect_no_answers()
    for record in state.roster.live():
        fence(state, record)


def fence(state: CoreState, record: AgentRecord) -> None:
    """Fence an agent for the present attempt; its answer is awaited."""
    state.fencing.expect_answer(record.agent)
    last = state.worlds.last
    members = last.members.values() if last is not None else ()
    own = {member.worker for member in members if member.worker and member.agent == record.agent}
    condemned = tuple(sorted(own & state.fencing.condemned))
    hosts = last.hosts_in_order() if last is not None else ()
    caches = token_caches.near(state, hosts, record.agent)
    attempt = state.worlds.attempt
    state.request(Fence(record.agent, attempt, record.incarnation, condemned, caches))


def drop_unanswered_agents(state: CoreState) -> None:
    """After the deadline of the fence, remove the agents that have not answered."""
    timeout_s = state.config.fence_timeout_s
    why = f"no answer to the fence of attempt {state.worlds.attempt} in {timeout_s:g} s"
    for agent in sorted(state.fencing.awaiting):
        record = state.roster.find(agent)
        if record is not None and record.live:
            if state.worlds.last is None or agent not in state.worlds.last.hosts():
                state.emit(StandbyEvent(agent=agent, state="lost"))
            drop_agent(state, agent, why)
    state.fencing.expect_no_answers()


def drop_agent(state: CoreState, agent: str, why: str) -> None:
    """Remove an agent: it counts as lost, and its processes must not continue."""
    record = state.roster.find(agent)
    if record is None or not record.live:
        return
    state.request(RemoveAgent(agent, why, record.incarnation))
    state.roster.mark_lost(agent)
    state.saves.release_agent(agent)
    state.add_evidence(f"agent {agent} was removed: {why}")


def form_if_ready(state: CoreState, now: float) -> None:
    """Once all live agents have answered the fence: form the world, or wait for a resource. While
    nothing is announced or nothing has changed, a call has no effect. At the end of a wait, a state
    in memory is enough even if the remote tier is known to have a newer one."""
    waiting, fencing = state.timer.stage is Stage.WAITING, state.timer.stage is Stage.FENCING
    if not waiting and not (fencing and not state.fencing.awaiting):
        return
    if state.fencing.is_proof_missing(state.roster):
        names = ", ".join(sorted(agent for agent, _ in state.fencing.unproven))
        every = "each" if state.config.spec.recovery.lease_s else "any"
        _wait_for(state, f"proof that the last attempt has stopped on {every} of {names}", now)
        return
    answered = state.roster.fenced(state.worlds.attempt)
    # One that is fenced once more may answer with another store.
    records = [record for record in answered if record.agent not in state.fencing.awaiting]
    shard_rescue.request_missing_shards(state, records)
    _follow_schedule(state, records)
    result = shape_selection.choose_seats(state, records, now)
    if outcome.is_last_step_durable(state) and (
        isinstance(result, Shortage) or _needs_no_further_attempt(state)
    ):
        outcome.conclude(state, now)
        return
    if _builds_are_in_the_way(state, result):
        _give_back_for_builds(state, now)
        return
    if isinstance(result, Shortage) or store_agent(result.assignment, records) is None:
        ranks = format_ranks(result.ranks) if isinstance(result, Shortage) else ""
        resource = f"node for {ranks}" if ranks else "rendezvous store"
        _wait_for(state, resource, now, lacks_nodes=bool(ranks))
        return
    _form_from_saved_state(state, result, records, now)


def _form_from_saved_state(
    state: CoreState, result: ShapedAssignment, records: list[AgentRecord], now: float
) -> None:
    known = _known_copies(state, records)
    point = _restore_point(state, result.shape, known)
    if point.source not in IN_MEMORY and not state.saves.known:
        in_memory = _restore_point(state, result.shape, {**known, "remotes": ()})
        if in_memory.source not in IN_MEMORY or not _has_waited(state, now):
            why = f" ({state.saves.problem})" if state.saves.problem else ""
            what = f"answer of the remote tier, which may hold a state that memory lacks{why}"
            _wait_for(state, what, now)
            return
        point = in_memory
    if point.source is RestoreSource.INIT and _had_nonfinite_step(state.incidents):
        why = (
            "from every saved state that was left the next step was not finite: the states were "
            "saved as computed, so check data and learning rate around step "
            f"{state.progress.committed}"
        )
        outcome.fail(state, now, "not_finite", why)
        return
    _form_world(state, result, point, holdings(result.shape.mesh, **known), records, now)


def _builds_are_in_the_way(state: CoreState, result: ShapedAssignment | Shortage) -> bool:
    """Whether the last world cannot be formed again because some nodes run another build of
    Holdfast since an upgrade: no node that comes will run the former one."""
    if not state.worlds.shapes:  # the first world of this supervisor
        return False
    if isinstance(result, Shortage):
        return bool(node_eligibility.agents_of_other_builds(state))
    is_smaller = result.shape.world_size < state.worlds.shape.world_size
    return is_smaller and bool(node_eligibility.hosts_of_other_builds(state))


def _give_back_for_builds(state: CoreState, now: float) -> None:
    if state.ending.giving_back is None:
        others = ", ".join(node_eligibility.agents_of_other_builds(state))
        why = f"Holdfast was upgraded: {others} and the job's other nodes run different builds"
        requeue.give_back(state, now, why)


def _follow_schedule(state: CoreState, records: list[AgentRecord]) -> None:
    """Take the mesh that the job's schedule has for the step that is restored."""
    if state.config.schedule:
        point = _restore_point(state, state.worlds.shape, _known_copies(state, records))
        state.growth.follow(state.config.scheduled(point.step))


def _needs_no_further_attempt(state: CoreState) -> bool:
    """Whether the saved job needs no further attempt: a stop was requested, or an attempt has
    already restored the last step and reported the digest of its state."""
    last = state.worlds.last
    return state.ending.stop is not None or (
        last is not None and last.restored_step >= state.ending.end_step
    )


def _restore_point(state: CoreState, shape: WorldShape, known: dict[str, Any]) -> RestorePoint:
    """The state that a world of `shape` restores. Doubted copies are used only if there is no
    other saved state."""
    find = partial(
        find_restore_point,
        world_size=shape.world_size,
        mesh=shape.mesh,
        initial=state.config.plan.origin,
    )
    point = find(**{**known, "bad": known["bad"] | state.saves.doubted_copies})
    return point if point.source is not RestoreSource.INIT else find(**known)


def _had_nonfinite_step(incidents: IncidentLog) -> bool:
    faults = incidents.current.faults if incidents.current is not None else ()
    return any(fault.cause is Cause.NOT_FINITE for fault in faults)


def admit_agent(state: CoreState, record: AgentRecord) -> None:
    """Admit an agent without ranks: fence it while an attempt forms, otherwise warm it up."""
    if state.timer.stage in (Stage.FENCING, Stage.WAITING):
        if state.timer.stage is Stage.WAITING or record.agent not in state.fencing.awaiting:
            fence(state, record)  # even if it has answered before: its inventory may have grown
    elif state.timer.stage in (Stage.FORMING, Stage.RUNNING, Stage.FINISHING):
        warm_up(state, record)


def warm_up(state: CoreState, record: AgentRecord) -> None:
    """Make the agent a standby of the present attempt; no older worker may run on it. A node
    that lacks software becomes none."""
    if record.fenced != state.worlds.attempt and record.report.attempt <= state.worlds.attempt:
        state.request(Fence(record.agent, state.worlds.attempt, record.incarnation))
    if node_eligibility.lacks_software(state.nodes, record):
        return
    token_caches.request_warm_up(state, record)
    ready = record.report.ready
    state.emit(StandbyEvent(agent=record.agent, state="ready" if ready else "warming"))


def _has_waited(state: CoreState, now: float) -> bool:
    timer = state.timer
    return timer.stage is Stage.WAITING and timer.deadline is not None and now >= timer.deadline


def _wait_for(state: CoreState, resource: str, now: float, *, lacks_nodes: bool = False) -> None:
    if state.timer.stage is not Stage.WAITING:
        patience = state.config.wait_for_replacement_s
        if state.worlds.last is None and state.progress.committed == 0:
            patience = max(patience, state.timer.start_deadline - now)  # a start replaces no node
        patience = state.timer.limit_to_former_wait(patience, now)
        if state.fencing.unproven:
            patience = max(patience, state.config.lapse_s or 0.0)  # until the leases have ended
        state.enter(Stage.WAITING, now, patience)
    if state.timer.name_resource(resource, lacks_nodes=lacks_nodes):
        state.incidents.amend(decision=Action.WAIT.value, reason=f"no {resource} is available")
        state.emit_incident()
        state.emit(WaitingEvent(resource=resource, until=state.timer.deadline))


def _known_copies(state: CoreState, records: list[AgentRecord]) -> dict[str, Any]:
    """The saved states that a restore point may be chosen from."""
    return {
        "copies": copies(records),
        "remotes": state.saves.remotes.values(),
        "line": state.progress.line,
        "bad": state.saves.bad_copies,
        "bad_uris": state.saves.bad_uris,
        "equality": state.config.replica_equality,
    }


def _form_world(
    state: CoreState,
    result: ShapedAssignment,
    point: RestorePoint,
    found: list[Holding],
    records: list[AgentRecord],
    now: float,
) -> None:
    if point.source in IN_MEMORY:
        state.progress.record_run(point.attempt)
    world = build_world(state, result, point, records, now)
    state.enter(Stage.FORMING, now, world.forming_s(state.config))
    decision = applied_decision(state.incidents.decision, seating(state, result.assignment, world))
    if state.worlds.last is not None and world.shape != state.worlds.shape:
        state.growth.record_resize(world.shape, now)
    _emit_decision(state, decision, point, world, why_not_newer(found, point.step))
    hosts = world.hosts()
    standbys = [record for record in records if record.agent not in hosts]
    _emit_forming(state, world, point, found, standbys)
    by_agent = {record.agent: record for record in records}
    for order_agent, order in form_orders(state, world, by_agent):
        state.request(Form(order_agent, order, by_agent[order_agent].incarnation))
    state.worlds.begin(world, state.roster)
    state.ending.keep()
    state.ending.begin_after(world.restored_step)
    state.mesh_change.drop()
    state.timer.end_wait()
    state.progress.start_attempt(world.attempt, world.restored_step)
    state.saves.keep_only(state.progress.line)
    for record in standbys:
        warm_up(state, record)


def _emit_decision(
    state: CoreState, decision: Decision, point: RestorePoint, world: AttemptWorld, not_newer: str
) -> None:
    reason, lost = decision.reason, max(0, state.progress.committed - point.step)
    if decision.refused:  # otherwise a former supervisor decided; the incident has its reasons
        state.incidents.amend(refused=decision.refused)
    state.incidents.amend(
        decision=decision.action.value, reason=f"{reason}; {not_newer}" if not_newer else reason
    )
    if not _may_be_own(state, point):
        tiers = {rank: member.restore.tier.value for rank, member in world.members.items()}
        state.incidents.amend(tiers=tiers)
    if not state.config.runs_program:  # a program's first step tells what it has loaded
        state.incidents.amend(restored_step=point.step, steps_lost=lost)
    state.emit_incident()


def _may_be_own(state: CoreState, point: RestorePoint) -> bool:
    """Whether only the program can have a checkpoint that the ranks start from."""
    return state.config.runs_program and point.source is RestoreSource.INIT


def _emit_forming(
    state: CoreState,
    world: AttemptWorld,
    point: RestorePoint,
    found: list[Holding],
    standbys: list[AgentRecord],
) -> None:
    members = [world.members[rank] for rank in sorted(world.members)]
    is_own = _may_be_own(state, point)
    restored = [] if is_own else members
    newest = newest_restorable(found)
    current = state.incidents.current
    state.emit(
        AttemptFormingEvent(
            attempt=world.attempt,
            mesh=world.shape.mesh,
            world_size=world.shape.world_size,
            members=tuple(member.seated() for member in members),
            standbys=tuple(_standby(record) for record in standbys),
            restore=RestorePlan(
                step=point.step,
                attempt=point.attempt,
                tiers={m.rank: m.restore.tier.value for m in restored},
                sources={m.rank: _source_name(m.restore) for m in restored},
                is_own=is_own,
                newest={tier.value: holding.step for tier, holding in newest.items()},
                found=tuple(map(_found_state, found[:MAX_FOUND_REPORTED])),
            ),
            cause_incident=current.number if current is not None else None,
        )
    )


def _found_state(holding: Holding) -> FoundState:
    return FoundState(
        tier=holding.source.value,
        step=holding.step,
        attempt=holding.attempt,
        mesh=holding.mesh,
        complete=holding.complete,
        missing=holding.missing,
    )


def _standby(record: AgentRecord) -> StandbyAgent:
    report = record.report
    return StandbyAgent(
        agent=record.agent,
        node_id=report.node_id,
        host=report.host,
        workers=tuple(
            SpareWorker(worker=worker.worker, pid=worker.pid) for worker in report.workers
        ),
    )


def _source_name(restore: Restore) -> str:
    agents = sorted({origin.agent for origin in restore.origins})
    return restore.agent or restore.uri or ", ".join(agents)
