"""What the ladder of decisions is told: what is known of a batch of faults, and what is at hand.

It also keeps the account of which nodes were to blame, and says which of them are avoided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from holdfast_service.placement.rank_assignment import Assignment, Node, assign
from holdfast_service.policy.causes import (
    AT_ONCE,
    Cause,
    Fault,
    Offence,
    blames_node,
    came_from_outside,
    comes_back,
    primary,
    within_window,
)
from holdfast_service.policy.decision_ladder import AGAIN, Budget, Situation, is_tolerable
from holdfast_service.policy.quarantine import node_name
from holdfast_service.recovery.core_state.roster import AgentRecord
from holdfast_service.recovery.core_state.state import State
from holdfast_service.recovery.nodes import node_eligibility
from holdfast_workers.protocol.messages import ErrorKind


def situation(state: State, batch: Sequence[Fault], now: float) -> Situation:
    """The faults of a moment as the ladder sees them. Their offences are counted before."""
    first = primary(batch)
    nodes = {_node_of(state, fault.agent) for fault in batch if blames_node(fault)} - {""}
    times = Counter(
        one.node
        for one in state.offences
        if first.cause is not Cause.CORRUPTION or one.cause is Cause.CORRUPTION
    )
    return Situation(
        cause=first.cause,
        what=first.what,
        step=first.step,
        error=first.error,
        named=first.worker is not None,
        node_gone=_is_lost(state, first.agent),
        times=max((times[node] for node in nodes), default=0),
        repeated=any(comes_back(state.mark, fault) for fault in batch),
        room=_has_room(state, first.agent, now),
        may_roll_back=first.error is not None and first.error.kind is ErrorKind.GUARD,
        ended=any(not is_tolerable(fault.cause) for fault in batch),
        budget=budget(state, now),
    )


def budget(state: State, now: float, coming: Sequence[Fault] = ()) -> Budget:
    """What is used of it; what is `coming` is counted as if its attempt were condemned for it."""
    config = state.config
    preempted = bool(coming) and is_preemption(coming)
    failed = bool(coming) and not preempted
    return Budget(
        failures=len(within_window(state.failures, now, config.window_s)) + failed,
        max_failures=config.max_failures,
        preemptions=len(within_window(state.preemptions, now, config.window_s)) + preempted,
        max_preemptions=config.max_preemptions,
        without_progress=state.without_progress + _is_lack_of_progress(coming),
        max_without_progress=config.max_without_progress,
        window_s=config.window_s,
    )


def is_preemption(batch: Sequence[Fault]) -> bool:
    """Whether somebody took away what was lost, on notice: no failure of anything."""
    seen = [fault for fault in batch if fault.cause is not Cause.COMMUNICATION]
    return bool(seen) and all(one.cause is Cause.PREEMPTED or one.on_notice for one in seen)


def count(state: State, batch: Sequence[Fault], now: float) -> None:
    """Take a condemned attempt into the account: budget, progress, and the nodes to blame."""
    window_s, incident = state.config.window_s, state.incident
    if is_preemption(batch):
        state.preemptions = (*within_window(state.preemptions, now, window_s), now)
        state.update_incident(preemptions=(*(incident.preemptions if incident else ()), now))
    else:
        state.failures = (*within_window(state.failures, now, window_s), now)
        state.update_incident(failures=(*(incident.failures if incident else ()), now))
    state.without_progress += _is_lack_of_progress(batch)
    blame(state, batch, now)


def _is_lack_of_progress(batch: Sequence[Fault]) -> bool:
    """Whether the attempt that it condemns counts as one of those that come to nothing."""
    if not batch:
        return False
    first = primary(batch)
    return first.cause not in _OTHER_STATE and not came_from_outside(first)


def blame(state: State, batch: Sequence[Fault], now: float) -> None:
    """Take down which nodes were to blame; each once for what is one moment's."""
    accused = {
        node: Offence(now, node, fault.agent, fault.cause)
        for fault in batch
        if blames_node(fault) and fault.agent is not None
        for node in [_node_of(state, fault.agent)]
        if node
    }
    recent = (one for one in state.offences if one.at > now - state.config.window_s)
    state.offences = (*recent, *accused.values())
    if state.incident is not None and accused:
        told = (*state.incident.offences, *accused.values())
        state.update_incident(offences=told)


def places(
    state: State, records: list[AgentRecord], ranks: Mapping[str, int], now: float
) -> list[Node]:
    """The agents as places for ranks (see `fitness.nodes`): those to blame come last."""
    blamed = _distrusted(state, now)
    names = {record.agent: _name(record) for record in records}
    return [
        replace(node, last_resort=node.last_resort or names[node.agent] in blamed)
        for node in node_eligibility.nodes(state, records, ranks)
    ]


def _distrusted(state: State, now: float) -> set[str]:
    """Nodes that get no ranks as long as there is other room."""
    recent = [one for one in state.offences if one.at > now - state.config.window_s]
    times = Counter(one.node for one in recent)
    return {one.node for one in recent if one.cause in AT_ONCE or times[one.node] >= AGAIN}


def _node_of(state: State, agent: str | None) -> str:
    """The node that the agent had its ranks on; "" if nobody knows."""
    for world in (state.world, state.last_world):
        for member in world.members.values() if world is not None else ():
            if member.agent == agent:
                return node_name(member.node_id, member.host)
    record = state.roster.record(agent) if agent is not None else None
    return _name(record) if record is not None else ""


def _name(record: AgentRecord) -> str:
    return node_name(record.report.node_id, record.report.host)


_OTHER_STATE = frozenset({Cause.BAD_STATE, Cause.NOT_FINITE, Cause.RESTORE_UNAVAILABLE})
"""Each makes the next attempt begin with another state, until none is left: that ends by itself."""


def _has_room(state: State, agent: str | None, now: float) -> bool:
    """Whether other agents are ready to take the agent's ranks beside their own. Those of last
    resort only where it is gone itself."""
    records = state.roster.live()
    there = {record.agent for record in records}
    if agent is None:
        return False
    hosts = {home.agent for home in state.homes.values()}
    nodes = [
        node
        for node in places(state, records, {}, now)
        if node.agent != agent
        and not (node.last_resort and agent in there and node.agent not in hosts)
    ]
    homes = {
        index: replace(home, alive=home.agent in there and home.agent != agent)
        for index, home in state.homes.items()
    }
    return isinstance(assign(state.config.groups, homes, nodes), Assignment)


def _is_lost(state: State, agent: str | None) -> bool:
    record = state.roster.record(agent) if agent is not None else None
    return record is not None and record.live and node_eligibility.is_lost(state, record)
