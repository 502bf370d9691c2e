"""The input of the decision ladder: the facts about a batch of faults, and the available nodes.

The module also records which nodes were to blame, and ranks those nodes last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from holdfast_service.placement.rank_assignment import Assignment, CandidateNode, assign
from holdfast_service.placement.world_shape import ShapedAssignment, assign_best
from holdfast_service.policy.causes import (
    MOVE_AT_ONCE,
    Cause,
    Fault,
    Offence,
    blames_node,
    is_data_outage,
    is_external,
    is_lack_of_progress,
    is_missing_module,
    is_planned,
    is_preemption,
    is_repeat_of,
    primary_fault,
    within_window,
)
from holdfast_service.policy.decision_ladder import DISTRUST_AFTER, Budget, Situation, is_tolerable
from holdfast_service.policy.quarantine import node_name
from holdfast_service.recovery.core_state.roster import AgentRecord
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.nodes import node_eligibility
from holdfast_workers.protocol.messages import ErrorKind

OWN_ENDS_FACTOR = 6.0
"""Multiple of the time after which an attempt of a program without steps counts as progress, for a
program that ended by itself."""


def assess(state: CoreState, batch: Sequence[Fault], now: float) -> Situation:
    """The input of the ladder for a batch of faults. Their offences must already be recorded."""
    first = primary_fault(batch)
    before = state.progress.mark
    program = state.config.runs_program
    repeated = any(
        is_repeat_of(before, fault, is_program=program) or is_missing_module(fault)
        for fault in batch
    )
    blamed = [fault.agent for fault in batch if blames_node(fault)]
    nodes = {_node_of_agent(state, agent) for agent in blamed} - {""}
    times = Counter(
        offence.node
        for offence in state.budget.offences
        if first.cause is not Cause.CORRUPTION or offence.cause is Cause.CORRUPTION
    )
    return Situation(
        cause=first.cause,
        what=first.what,
        step=first.step if first.knows_step or not program else None,
        error=first.error,
        named=first.worker is not None,
        node_gone=_has_lost_device(state, first.agent),
        times=max((times[node] for node in nodes), default=0),
        repeated=repeated,
        room=_has_room(state, first.agent, now),
        smaller=_has_room_for_smaller_mesh(state, first.agent, now),
        is_program=program,
        too_large=state.worlds.shape not in state.growth.allowed(state.config.shapes),
        may_roll_back=first.error is not None and first.error.kind is ErrorKind.GUARD,
        data_outage_s=_data_outage_s(state, now),
        ended=any(not is_tolerable(fault.cause) for fault in batch),
        budget=budget(state, now),
    )


def _data_outage_s(state: CoreState, now: float) -> float:
    """The time since attempts end for want of data at the same step."""
    return max(0.0, now - state.progress.no_data[0]) if state.progress.no_data is not None else 0.0


def budget(state: CoreState, now: float, coming: Sequence[Fault] = ()) -> Budget:
    """The used budget. Faults in `coming` count as if they had condemned the attempt."""
    limits = state.config.spec.recovery
    preempted = bool(coming) and is_preemption(coming)
    failed = bool(coming) and not preempted
    return Budget(
        failures=len(within_window(state.budget.failures, now, limits.window_s)) + failed,
        max_failures=limits.max_failures,
        preemptions=len(within_window(state.budget.preemptions, now, limits.window_s)) + preempted,
        max_preemptions=limits.max_preemptions,
        without_progress=state.progress.without_progress + is_lack_of_progress(coming),
        max_without_progress=limits.max_without_progress,
        window_s=limits.window_s,
    )


def is_on_notice(state: CoreState, fault: Fault) -> bool:
    """Whether the fault is the announced removal of a node."""
    return is_external(fault) and node_eligibility.is_draining(state, fault.agent)


def record_condemned_attempt(state: CoreState, batch: Sequence[Fault], now: float) -> None:
    """Count a condemned attempt: budget, progress, and the nodes to blame."""
    incident = state.incidents.current
    if is_planned(batch):
        return
    if is_preemption(batch):
        state.budget.count_preemption(now)
        state.incidents.amend(preemptions=(*(incident.preemptions if incident else ()), now))
    elif is_data_outage(batch):  # a bound of its own: `DATA_OUTAGE_S`
        state.incidents.amend(data_outages=(*(incident.data_outages if incident else ()), now))
        state.progress.record_want_of_data(now)
    else:
        state.budget.count_failure(now)
        state.incidents.amend(failures=(*(incident.failures if incident else ()), now))
    if _ran_long(state, batch, now):
        state.progress.count_as_progress()
    elif is_lack_of_progress(batch):
        state.progress.count_lack_of_progress()
    record_offences(state, batch, now)


def _ran_long(state: CoreState, batch: Sequence[Fault], now: float) -> bool:
    """Whether a program that reports no steps ran so long that it must have got on. If it ended by
    itself, it may have come to the same place again: that takes longer to count."""
    world = state.worlds.present
    if not state.config.runs_program or world is None or world.first_step is not None:
        return False
    wanted_s = state.config.program_progress_s
    if is_lack_of_progress(batch):
        wanted_s *= OWN_ENDS_FACTOR
    return world.joined_at is not None and now - world.joined_at >= wanted_s


def record_offences(state: CoreState, batch: Sequence[Fault], now: float) -> None:
    """Record the nodes to blame, each once per batch."""
    accused = {
        node: Offence(now, node, fault.agent, fault.cause)
        for fault in batch
        if blames_node(fault) and fault.agent is not None
        for node in [_node_of_agent(state, fault.agent)]
        if node
    }
    state.budget.add_offences(accused.values(), now)
    if state.incidents.current is not None and accused:
        offences = (*state.incidents.current.offences, *accused.values())
        state.incidents.amend(offences=offences)


def candidate_nodes(
    state: CoreState, records: list[AgentRecord], ranks: Mapping[str, int], now: float
) -> list[CandidateNode]:
    """The agents as candidate nodes (see `node_eligibility`); nodes to blame are a last resort."""
    blamed = _distrusted(state, now)
    names = {record.agent: _node_name(record) for record in records}
    return [
        replace(node, last_resort=node.last_resort or names[node.agent] in blamed)
        for node in node_eligibility.candidate_nodes(state, records, ranks)
    ]


def _distrusted(state: CoreState, now: float) -> set[str]:
    """Nodes that get ranks only if no other node can take them."""
    recent = state.budget.recent_offences(now)
    times = Counter(offence.node for offence in recent)
    return {
        offence.node
        for offence in recent
        if offence.cause in MOVE_AT_ONCE or times[offence.node] >= DISTRUST_AFTER
    }


def _node_of_agent(state: CoreState, agent: str | None) -> str:
    """The node on which the agent hosted its ranks; "" if unknown."""
    member = state.worlds.find_member(agent) if agent is not None else None
    if member is not None:
        return node_name(member.node_id, member.host)
    record = state.roster.find(agent) if agent is not None else None
    return _node_name(record) if record is not None else ""


def _node_name(record: AgentRecord) -> str:
    return node_name(record.report.node_id, record.report.host)


def _has_room(state: CoreState, agent: str | None, now: float) -> bool:
    """Whether other agents can take the agent's ranks beside their own. Agents of last resort count
    only if the agent itself is gone."""
    records = state.roster.live()
    live = {record.agent for record in records}
    if agent is None:
        return False
    hosts = {home.agent for home in state.worlds.homes.values()}
    nodes = [
        node
        for node in candidate_nodes(state, records, {}, now)
        if node.agent != agent
        and not (node.last_resort and agent in live and node.agent not in hosts)
    ]
    homes = {
        index: replace(home, alive=home.agent in live and home.agent != agent)
        for index, home in state.worlds.homes.items()
    }
    return isinstance(assign(state.worlds.shape.groups, homes, nodes), Assignment)


def _has_room_for_smaller_mesh(state: CoreState, agent: str | None, now: float) -> bool:
    """Whether a mesh after the present one in the job's list has room without the agent."""
    shapes = state.config.shapes
    smaller = shapes[shapes.index(state.worlds.shape) + 1 :]
    records = [record for record in state.roster.live() if record.agent != agent]
    nodes = [node for node in candidate_nodes(state, records, {}, now) if not node.avoid]
    homes = state.worlds.homes_among(records)
    found = assign_best(smaller, state.worlds.shape, homes, nodes)
    return isinstance(found, ShapedAssignment)


def _has_lost_device(state: CoreState, agent: str | None) -> bool:
    record = state.roster.find(agent) if agent is not None else None
    return (
        record is not None and record.live and node_eligibility.has_lost_device(state.nodes, record)
    )
