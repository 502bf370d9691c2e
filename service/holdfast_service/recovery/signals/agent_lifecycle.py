"""Agents come, go and answer: what that means for the attempt."""

from __future__ import annotations

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.placement.rank_assignment import listed
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.recovery.core_state.effects import RemoveAgent
from holdfast_service.recovery.core_state.inputs import (
    AgentLost,
    CommandFailed,
    Fenced,
    LeaseEnded,
    NodeChecked,
    NodeWord,
)
from holdfast_service.recovery.core_state.roster import Arrival
from holdfast_service.recovery.core_state.state import WITH_WORLD, Stage, State
from holdfast_service.recovery.faults import hang_suspicion, judgement, node_eviction
from holdfast_service.recovery.signals import signal_handlers
from holdfast_service.recovery.upkeep import command_retry, injection_dispatch, remote_outage
from holdfast_service.recovery.upkeep.partners import mend_partners
from holdfast_service.recovery.world import attempt_formation, stop_proof
from holdfast_workers.protocol.messages import AgentReport

REPEATED = frozenset({"set_partners", "set_intervals", "free_memory", "warm_up"})


def arrived(state: State, report: AgentReport, now: float) -> None:
    """An agent is there: for the first time, again, in a new life, or simply still."""
    if (report.agent, report.incarnation) in state.dead:
        return
    arrival = state.roster.take(report)
    if arrival is Arrival.STALE:
        return
    state.lapsed.discard((report.agent, report.incarnation))
    if arrival is not Arrival.KNOWN:
        state.awaiting.discard(report.agent)  # a fence sent to its former life has no answer
    _take_shards(state, report)
    if arrival is Arrival.RESTARTED:
        _forget_former_life(state, report.agent, now)
    record = state.roster.record(report.agent)
    if record is not None:
        node_eviction.take_health(state, record, node_eviction.report_of_health(report))
        if arrival is not Arrival.KNOWN:
            state.unchecked.pop(report.agent, None)  # who comes, or comes back, was checked
    hosting = state.world is not None and report.agent in state.world.hosts()
    if record is not None and not hosting and state.stage is not Stage.ENDED:
        attempt_formation.welcome(state, record)
        mend_partners(state, now)


def lost(state: State, given: AgentLost, now: float) -> None:
    """An agent is gone, or cannot be reached."""
    record = state.roster.record(given.agent)
    if given.certain:
        _has_ended(state, given.agent, given.incarnation or (record.incarnation if record else ""))
    if record is None or not state.roster.is_current(given.agent, given.incarnation):
        _go_on(state, now)
        return
    was_live = record.live
    state.roster.lose(given.agent)
    state.saves.release(given.agent)
    state.awaiting.discard(given.agent)
    world = state.world if state.stage in WITH_WORLD else state.last_world
    if world is not None and given.agent in world.hosts():
        judgement.accuse(state, _loss(state, given, now), now)
    elif was_live:
        state.emit(EventKind.STANDBY, agent=given.agent, state="lost")
        state.note(f"standby {given.agent} is lost: {given.why}")
        mend_partners(state, now)
    _go_on(state, now)


def checked(state: State, given: NodeChecked, now: float) -> None:
    """A node that was set aside may be used again, if it is fit."""
    node_eviction.checked(state, given.report)
    _go_on(state, now)


def _has_ended(state: State, agent: str, incarnation: str) -> None:
    state.dead.add((agent, incarnation))
    state.lapsed.add((agent, incarnation))
    stop_proof.found(state, agent, incarnation)


def lapsed(state: State, given: LeaseEnded, now: float) -> None:
    """A life of an agent that is not there any more has no lease."""
    record = state.roster.record(given.agent)
    live = record is not None and record.live and record.incarnation == given.incarnation
    if given.certain:
        _has_ended(state, given.agent, given.incarnation)
        if live:
            lost(state, AgentLost(given.agent, "its process has ended", given.incarnation), now)
            return
    elif live:
        return  # told late: it is back, and was granted more since
    state.lapsed.add((given.agent, given.incarnation))
    _go_on(state, now)


def node_told(state: State, given: NodeWord) -> None:
    """Why an agent was lost: with its node, or alone. For the record of the incident that it
    belongs to, which may be closed by now."""
    for incident in (state.incident, state.closed_incident):
        if incident is None or not incident.has_lost_agent(given.agent):
            continue
        amended = incident.with_node_lost(given.agent) if given.lost else incident
        amended = amended.with_evidence(given.evidence)
        if incident is state.incident:
            state.incident = amended
        else:
            state.closed_incident = amended
        state.emit(EventKind.INCIDENT_UPDATED, **amended.data())
        return


def made_way(state: State, given: Fenced, now: float) -> None:
    """An agent has answered a fence. Late answers to older fences mean nothing."""
    if given.attempt != state.attempt or state.stage in (Stage.ASSEMBLING, Stage.ADOPTING):
        return
    if (given.agent, given.report.incarnation) in state.dead:
        return
    arrival = state.roster.take(given.report)
    if arrival is Arrival.STALE:
        return
    state.lapsed.discard((given.agent, given.report.incarnation))
    if arrival is Arrival.RESTARTED:
        _forget_former_life(state, given.agent, now)
    _take_shards(state, given.report)
    if state.stage is Stage.ENDED:
        return
    state.roster.has_made_way(given.report, given.attempt)
    state.awaiting.discard(given.agent)
    stop_proof.found(state, given.agent, given.report.incarnation)
    for held in given.report.held:
        state.note_step(held.attempt, held.step)
    _go_on(state, now)


def command_failed(state: State, given: CommandFailed, now: float) -> None:
    """A command did not get through: its agent is as good as lost, and made so."""
    if given.command == "finalize_checkpoint":
        _finalize_failed(state, given, now)
        return
    if given.command == "inject":
        injection_dispatch.failed(state, given)
        return
    if given.command == "inspect":
        hang_suspicion.failed(state, given, now)
        return
    if given.command == "check_node":
        node_eviction.check_failed(state, given, now)
        return
    if given.attempt != state.attempt or given.command not in ("fence", "form"):
        state.note(f"{given.command} failed on {given.agent}: {given.why}")
        if given.attempt == state.attempt and given.command in REPEATED:
            command_retry.failed(state, given)
        return
    record = state.roster.record(given.agent)
    if (
        record is None
        or not record.live
        or not state.roster.is_current(given.agent, given.incarnation)
    ):
        return
    why = f"{given.command} of attempt {given.attempt} failed: {given.why}"
    state.ask(RemoveAgent(given.agent, why, record.incarnation))
    lost(state, AgentLost(given.agent, why, certain=False), now)


def _take_shards(state: State, report: AgentReport) -> None:
    for shard in report.shards:
        signal_handlers.shard_saved(state, int(shard["attempt"]), int(shard["rank"]), dict(shard))


def _forget_former_life(state: State, agent: str, now: float) -> None:
    state.saves.release(agent)
    state.bad_links = {link: at for link, at in state.bad_links.items() if agent not in link}
    for life in [one for one in state.unproven if one[0] == agent and not state.config.lease_s]:
        stop_proof.found(state, *life)
    world = state.world
    if world is None:
        return
    if agent in world.hosts():
        loss = AgentLost(agent, "its process was replaced by a new one")
        judgement.accuse(state, _loss(state, loss, now), now)
        return
    for member in world.members.values():
        # Its address and what it held are of the former life.
        member.partners = tuple(one for one in member.partners if one != agent)


def _loss(state: State, given: AgentLost, now: float) -> Fault:
    world = state.world or state.last_world
    members = world.members.values() if world is not None else ()
    ranks = [member.rank for member in members if member.agent == given.agent]
    return Fault(
        Cause.AGENT_LOST,
        attempt=state.attempt,
        at=now if given.at is None else given.at,
        what=f"agent {given.agent} with {listed(ranks)} is lost: {given.why}",
        rank=min(ranks, default=None),
        ranks=tuple(ranks),
        agent=given.agent,
        step=state.committed,
        certain=given.certain,
    )


def _finalize_failed(state: State, given: CommandFailed, now: float) -> None:
    """Another agent tries, a few times; then the checkpoint is given up. If it is the remote tier
    that does not take it, it is tried until it does."""
    pending = state.saves.pending.get((given.attempt, given.step))
    if pending is None or pending.agent != given.agent:
        return
    pending.agent, pending.last = None, given.agent
    if given.refused:
        what = f"{given.agent} cannot publish step {given.step}: {given.why}"
        remote_outage.noticed(
            state, now, at=now, what=what, step=given.step, rank=None, agent=given.agent
        )
        pending.refusals += 1
        pause_s = state.config.finalize_pause_s * 2.0 ** min(pending.refusals - 1, 10)
        pending.not_before = now + min(pause_s, state.config.finalize_longest_pause_s)
        return
    pending.failures += 1
    if pending.failures >= state.config.finalize_attempts:
        state.saves.drop(given.attempt, given.step)
        message = f"step {given.step} could not be finalized: {given.why}"
        state.emit(EventKind.CHECKPOINT_BAD, step=given.step, uri="", message=message)


def _go_on(state: State, now: float) -> None:
    """An agent less to wait for, or one more to count on."""
    if state.stage is Stage.WAITING or (state.stage is Stage.FENCING and not state.awaiting):
        attempt_formation.decide(state, now)
