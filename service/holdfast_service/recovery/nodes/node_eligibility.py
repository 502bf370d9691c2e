"""Eligibility of nodes for ranks: by health, by the control plane, and by announced removal.

- An avoided node (unfit, cordoned or draining) keeps its ranks while no other node can take them.
- A node whose device is lost can run no rank.
- A quarantined node is used as a last resort: its faults are in the past.
- The ranks of one world run one build of Holdfast, so agents of another build get none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from holdfast_service.placement.rank_assignment import CandidateNode
from holdfast_service.policy.quarantine import NodeStanding, node_name
from holdfast_service.recovery.core_state.node_records import NodeRecords
from holdfast_service.recovery.core_state.roster import AgentIncarnation, AgentRecord
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_workers.protocol.findings import ROOM, SOFTWARE, HealthFinding, Level, messages_of


def findings_of(nodes: NodeRecords, record: AgentRecord) -> tuple[HealthFinding, ...]:
    """The last known health findings of the agent's node, in its present incarnation."""
    health = nodes.health.get(record.agent)
    is_current = health is not None and health.incarnation == record.incarnation
    return health.findings if health is not None and is_current else ()


def why_unfit(nodes: NodeRecords, record: AgentRecord) -> str:
    """Why the node is unfit for training; "" if no reason is known."""
    findings = findings_of(nodes, record)
    return messages_of(findings) if findings else ""


def has_lost_device(nodes: NodeRecords, record: AgentRecord) -> bool:
    """Whether a device that ranks need is gone from the node."""
    findings = findings_of(nodes, record)
    return any(finding.lost and finding.level is Level.UNFIT for finding in findings)


def lacks_software(nodes: NodeRecords, record: AgentRecord) -> bool:
    """Whether no agent can run on the node: only answers of its seat come from there."""
    return any(finding.probe == SOFTWARE for finding in findings_of(nodes, record))


def unsuitable_nodes(state: CoreState) -> dict[str, str]:
    """Live agents whose nodes lack room for the job or software, and a phrase with what is lacking.
    Not the job, but only other nodes help."""
    phrases = {}
    for record in state.roster.live():
        findings = findings_of(state.nodes, record)
        small = messages_of(finding for finding in findings if finding.probe == ROOM)
        lacking = messages_of(finding for finding in findings if finding.probe == SOFTWARE)
        if small or lacking:
            phrases[record.agent] = (
                f"cannot be used: {lacking}" if lacking else f"is too small: {small}"
            )
    return phrases


def why_set_aside(nodes: NodeRecords, record: AgentRecord, standing: NodeStanding) -> str:
    """Why the control plane gave the node that standing; "" if the node does not have it."""
    if not nodes.avoided:
        return ""
    avoided = nodes.avoided.get(node_name(record.report.node_id, record.report.host))
    return avoided.reason if avoided is not None and avoided.standing is standing else ""


def is_unchecked(nodes: NodeRecords, record: AgentRecord) -> bool:
    """Whether the node was avoided and must be checked before it gets a rank again."""
    due = nodes.unchecked.get(record.agent)
    return due is not None and due.incarnation == record.incarnation


def is_draining(state: CoreState, agent: str | None) -> bool:
    """Whether the cluster is about to remove the agent's node, or has removed it."""
    if agent is None or not state.nodes.draining:
        return False
    record = state.roster.find(agent)
    return record is not None and record.report.node_id in state.nodes.draining


def any_draining(state: CoreState, agents: Iterable[str]) -> bool:
    return any(is_draining(state, agent) for agent in agents)


def why_avoided(state: CoreState, record: AgentRecord) -> str:
    """Why the node gets no new rank; "" if it may get ranks."""
    if record.agent in state.corruption.sidelined:
        return "another node must compute the part of its ranks"
    cordoned = why_set_aside(state.nodes, record, NodeStanding.CORDONED)
    return why_unfit(state.nodes, record) or cordoned or _why_draining(state, record)


def _why_draining(state: CoreState, record: AgentRecord) -> str:
    if not is_draining(state, record.agent):
        return ""
    deadline = state.nodes.draining[record.report.node_id]
    when = "" if deadline is None else f", at {_utc_time(deadline)}"
    return f"the cluster is about to remove it{when}"


def _utc_time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S UTC")


def build_of_job(state: CoreState) -> str:
    """The build of Holdfast that the next ranks run: that of the agents of the newest world, as
    long as one of them lives; otherwise that of most agents, the supervisor's own if in doubt."""
    live, hosts = state.roster.live(), _newest_hosts(state)
    builds = Counter(
        record.report.build for record in live if (record.agent, record.incarnation) in hosts
    )
    builds = builds or Counter(record.report.build for record in live)
    own = state.config.build
    return max(sorted(builds), key=lambda build: (builds[build], build == own), default=own)


def _newest_hosts(state: CoreState) -> set[AgentIncarnation]:
    world = state.worlds.present or state.worlds.last
    if world is not None:
        return world.incarnations()
    members = state.facts.members if state.facts is not None else ()
    return {(member.agent, member.incarnation) for member in members}


def agents_of_other_builds(state: CoreState) -> list[str]:
    """The live agents that can get no rank because they run another build of Holdfast."""
    build = build_of_job(state)
    return [record.agent for record in state.roster.live() if record.report.build != build]


def hosts_of_other_builds(state: CoreState) -> list[str]:
    """The hosts of another build that ran ranks of the newest world, before they were started
    again."""
    hosts = {agent for agent, _ in _newest_hosts(state)}
    return [agent for agent in agents_of_other_builds(state) if agent in hosts]


def candidate_nodes(
    state: CoreState, records: list[AgentRecord], ranks: Mapping[str, int]
) -> list[CandidateNode]:
    """The agents as candidate nodes (see `Roster.nodes`), with their eligibility. Processes that
    are bound to a mesh before the newest are left out."""
    by_agent = {record.agent: record for record in records}
    axes, build = state.worlds.shape.axes, build_of_job(state)
    bound_elsewhere = {
        worker.worker
        for record in records
        for worker in record.report.workers
        if worker.rank is not None and state.worlds.shape_of(worker.attempt).axes != axes
    }
    return [
        replace(
            node,
            idle=tuple(each for each in node.idle if each.worker not in bound_elsewhere),
            ready=node.ready
            and by_agent[node.agent].report.build == build
            and not _is_barred(state, by_agent[node.agent]),
            avoid=bool(why_avoided(state, by_agent[node.agent])),
            last_resort=bool(
                why_set_aside(state.nodes, by_agent[node.agent], NodeStanding.QUARANTINED)
            ),
        )
        for node in state.roster.nodes(records, ranks)
    ]


def _is_barred(state: CoreState, record: AgentRecord) -> bool:
    """Whether the node can run no rank: for now, or not even a rank that it already runs."""
    is_sidelined = record.agent in state.corruption.sidelined
    nodes = state.nodes
    return is_sidelined or has_lost_device(nodes, record) or is_unchecked(nodes, record)
