"""Ranks leave a node that should not, or cannot, be trained on any more, if there is a better one.

The fault that says so proves nothing about the attempt that runs there: as after any other
uncertain one, the fence's answer does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.placement.rank_assignment import Assignment, Home, assign, listed
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.policy.quarantine import Avoided, node_name
from holdfast_service.recovery.core_state.effects import CheckNode
from holdfast_service.recovery.core_state.inputs import CommandFailed, Exchanged
from holdfast_service.recovery.core_state.roster import AgentRecord
from holdfast_service.recovery.core_state.state import Health, Stage, State, Unchecked, World
from holdfast_service.recovery.faults import judgement
from holdfast_service.recovery.nodes import node_eligibility, situation
from holdfast_workers.health.findings import Finding, Level
from holdfast_workers.protocol.messages import AgentReport, Signal


def health_told(state: State, signal: Signal, now: float) -> None:
    """An agent finds its node's health changed."""
    del now
    record = state.roster.record(signal.agent)
    if record is not None:
        take_health(state, record, signal.detail)


def take_health(state: State, record: AgentRecord, said: Mapping[str, Any]) -> None:
    """What an agent says of its node's health, unless it has said something newer."""
    before = _known(state, record)
    if said["health"] > before.number:
        found = tuple(Finding.from_data(one) for one in said["findings"])
        number, measured = int(said["health"]), dict(said["measured"])
        _note(state, record, replace(before, number=number, found=found, measured=measured))


def exchanged(state: State, given: Exchanged) -> None:
    """Others reach each other, and not this node; or this one again."""
    record = state.roster.record(given.agent)
    if record is not None and record.incarnation == given.incarnation:
        what = f"bytes do not reach the node of {given.agent} and come back: {given.why}"
        finding = Finding("exchange", "unreached", Level.UNFIT, what) if given.why else None
        _note(state, record, replace(_known(state, record), unreached=finding))


def set_aside(state: State, nodes: Mapping[str, Avoided], now: float) -> None:
    """These nodes are set aside, and no others. Who is back is checked before it gets a rank; one
    that has kept its ranks meanwhile is in use anyway."""
    before, state.avoided = state.avoided, dict(nodes)
    back = before.keys() - nodes.keys()
    homes = {home.agent for home in state.homes.values()}
    for record in state.roster.live():
        name = node_name(record.report.node_id, record.report.host)
        if name in back and record.agent not in homes:
            state.unchecked[record.agent] = Unchecked(record.incarnation, now)
            state.emit(EventKind.STANDBY, agent=record.agent, state="checking")
    check_unchecked(state, now)


def check_unchecked(state: State, now: float) -> None:
    """Have the checks made that are due."""
    for agent, check in _checks(state).items():
        if check.due <= now:
            check.due = now + state.config.check_timeout_s
            state.ask(CheckNode(agent, check.incarnation))


def check_due(state: State) -> float | None:
    """When `check_unchecked` is needed."""
    return min((check.due for check in _checks(state).values()), default=None)


def _checks(state: State) -> dict[str, Unchecked]:
    """Of agents that are there, in the life that it is about: a new life begins with a check."""
    live = {record.agent: record for record in state.roster.live()} if state.unchecked else {}
    return {
        agent: state.unchecked[agent]
        for agent in live
        if node_eligibility.is_unchecked(state, live[agent])
    }


def checked(state: State, report: AgentReport) -> None:
    """A node was checked: what it is fit for, its health says from now on."""
    record = state.roster.record(report.agent)
    if record is None or record.incarnation != report.incarnation:
        return
    take_health(state, record, report_of_health(report))
    if node_eligibility.is_unchecked(state, record):
        del state.unchecked[report.agent]
        unfit = bool(node_eligibility.why_unfit(state, record))
        state.emit(EventKind.STANDBY, agent=report.agent, state="unfit" if unfit else "ready")


def check_failed(state: State, given: CommandFailed, now: float) -> None:
    """Asked again later: what is not measured is not healthy."""
    check = state.unchecked.get(given.agent)
    if check is not None and check.incarnation == given.incarnation:
        check.due = now + state.config.check_pause_s


def report_of_health(report: AgentReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in ("health", "findings", "measured")}


def _known(state: State, record: AgentRecord) -> Health:
    known = state.health.get(record.agent)
    if known is None or known.incarnation != record.incarnation:
        return Health(record.incarnation)
    return known


def _note(state: State, record: AgentRecord, health: Health) -> None:
    """Tell it if it is news."""
    before, state.health[record.agent] = _known(state, record), health
    same = {one.key for one in before.findings} == {one.key for one in health.findings}
    if same and before.measured == health.measured:
        return
    state.emit(
        EventKind.NODE_HEALTH,
        agent=record.agent,
        node_id=record.report.node_id,
        host=record.report.host,
        findings=[one.data() for one in health.findings],
        measured=dict(health.measured),
    )


def leave_if_better(state: State, now: float) -> None:
    """Condemn the world if a node of it is to be left and its ranks have somewhere to go, or if
    it cannot run them any more."""
    world = state.world
    if state.stage is not Stage.RUNNING or world is None or state.stop is not None:
        return
    records = state.roster.live()
    by_agent = {record.agent: record for record in records}
    hosts = [by_agent[agent] for agent in sorted(world.hosts()) if agent in by_agent]
    left = {
        record.agent: why
        for record in hosts
        if (why := node_eligibility.why_avoided(state, record))
    }
    if not left:
        return
    homes = {
        index: Home(home.agent, home.domain, alive=True) for index, home in state.homes.items()
    }
    result = assign(state.config.groups, homes, situation.places(state, records, {}, now))
    moved = result.moved if isinstance(result, Assignment) else ()
    emptied = {homes[index].agent for index in moved}
    for record in hosts:
        agent = record.agent
        if agent in left and (agent in emptied or node_eligibility.is_lost(state, record)):
            _accuse(state, world, record, left[agent], now)


def _accuse(state: State, world: World, record: AgentRecord, why: str, now: float) -> None:
    ranks = tuple(one.rank for one in world.members.values() if one.agent == record.agent)
    unwell = bool(node_eligibility.why_unfit(state, record))
    said = "is unwell" if unwell else "is to be left"
    fault = Fault(
        Cause.NODE_UNWELL if unwell else Cause.PREEMPTED,
        attempt=world.attempt,
        at=now,
        what=f"the node of {record.agent} with {listed(ranks)} {said}: {why}",
        rank=min(ranks, default=None),
        ranks=ranks,
        agent=record.agent,
        step=state.committed,
        certain=False,
    )
    judgement.accuse(state, fault, now)
