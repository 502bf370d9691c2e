"""Which nodes may be given ranks, by their health and by what operators and the service say.

A node that is to be avoided keeps the ranks it has as long as there is no other place for them;
one whose device is gone can run none. One in quarantine is better than none: what counts against
it is of the past.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from holdfast_service.placement.rank_assignment import Node
from holdfast_service.policy.quarantine import Standing, node_name
from holdfast_service.recovery.core_state.roster import AgentRecord
from holdfast_service.recovery.core_state.state import State
from holdfast_workers.health.findings import Finding, Level, in_words


def findings_of(state: State, record: AgentRecord) -> tuple[Finding, ...]:
    """What was last heard of the health of the agent's node, in this life of it."""
    health = state.health.get(record.agent)
    there = health is not None and health.incarnation == record.incarnation
    return health.findings if health is not None and there else ()


def why_unfit(state: State, record: AgentRecord) -> str:
    """What makes the node unfit to train on; "" if nothing known does."""
    return in_words(findings_of(state, record))


def is_lost(state: State, record: AgentRecord) -> bool:
    """Whether what ranks need on that node is gone."""
    found = findings_of(state, record)
    return any(one.lost and one.level is Level.UNFIT for one in found)


def set_aside(state: State, record: AgentRecord, standing: Standing) -> str:
    """Why the node has that standing with the control plane; "" if it has not."""
    found = state.avoided.get(node_name(record.report.node_id, record.report.host))
    return found.reason if found is not None and found.standing is standing else ""


def is_closed(state: State, record: AgentRecord) -> bool:
    """Whether no rank can be there, not even one that was."""
    return is_lost(state, record) or record.agent in state.sidelined


def is_unchecked(state: State, record: AgentRecord) -> bool:
    """Whether the node was set aside, and is to be checked before it gets a rank again."""
    due = state.unchecked.get(record.agent)
    return due is not None and due.incarnation == record.incarnation


def drains(state: State, agent: str | None) -> bool:
    """Whether the cluster is about to take the agent's node away, or has."""
    record = state.roster.record(agent) if agent is not None else None
    return record is not None and record.report.node_id in state.draining


def any_drains(state: State, agents: Iterable[str]) -> bool:
    return bool(state.draining) and any(drains(state, agent) for agent in agents)


def why_avoided(state: State, record: AgentRecord) -> str:
    """Why no new rank is to be seated there; "" if one may."""
    if record.agent in state.sidelined:
        return "another node is to compute what its ranks computed"
    cordoned = set_aside(state, record, Standing.CORDONED)
    return why_unfit(state, record) or cordoned or _why_drained(state, record)


def _why_drained(state: State, record: AgentRecord) -> str:
    if not drains(state, record.agent):
        return ""
    deadline = state.draining[record.report.node_id]
    at = "" if deadline is None else f", at {_clock(deadline)}"
    return f"the cluster is about to take it away{at}"


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S UTC")


def nodes(state: State, records: list[AgentRecord], ranks: Mapping[str, int]) -> list[Node]:
    """The agents as places for ranks (see `Roster.nodes`), each as far as it may be used."""
    by_agent = {record.agent: record for record in records}
    return [
        replace(
            node,
            ready=node.ready and not _is_barred(state, by_agent[node.agent]),
            avoid=bool(why_avoided(state, by_agent[node.agent])),
            last_resort=bool(set_aside(state, by_agent[node.agent], Standing.QUARANTINED)),
        )
        for node in state.roster.nodes(records, ranks)
    ]


def _is_barred(state: State, record: AgentRecord) -> bool:
    return is_closed(state, record) or is_unchecked(state, record)
