"""Stores nodes: their last sighting, the incidents attributed to them, and their quarantine state.

`policy/quarantine.py` makes each decision about a node, inside the transaction that stores the
event behind the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, tuple_
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.events.attempts import AttemptFormingEvent, AttemptRunningEvent
from holdfast_service.job_model.events.codec import AnyEvent
from holdfast_service.job_model.events.health import NodeHealthEvent, NodeQuarantinedEvent
from holdfast_service.job_model.events.incidents import IncidentEvent, IncidentRecord
from holdfast_service.job_model.supervisor_protocol import NodeCapacity
from holdfast_service.policy.incident_parts import LostItem
from holdfast_service.policy.quarantine import (
    Avoided,
    NodeDecision,
    NodeIncident,
    NodeStanding,
    QuarantineRules,
    decide_quarantine,
    node_name,
    quarantined,
    standing_at,
)
from holdfast_service.store.json_safe import text
from holdfast_service.store.models import AttemptMember, NodeRow, NodeTrouble
from holdfast_service.store.transaction import JobTransaction
from holdfast_workers.protocol.codec import as_json
from holdfast_workers.protocol.findings import ROOM, SOFTWARE, messages_of
from holdfast_workers.protocol.node_needs import NodeNeeds

GONE_AFTER_S = 30.0
"""A node that was not seen for this long has left the cluster."""
ROOM_KEPT_S, ROOMS_KEPT = 3600.0, 16
"""How long, and how many, findings of rooms that were too small stay beside those of others."""


def quarantine_of(node: NodeRow) -> NodeDecision:
    return NodeDecision(NodeStanding(node.state), node.reason, node.since, node.until, node.strikes)


def set_quarantine(node: NodeRow, new: NodeDecision) -> None:
    node.state, node.reason = new.state, text(new.reason)
    node.since, node.until, node.strikes = new.since, new.until, new.strikes


def is_present(node: NodeRow, now: float) -> bool:
    return node.last_seen > now - GONE_AFTER_S


async def avoided(session: AsyncSession, now: float) -> dict[str, Avoided]:
    """The quarantined and cordoned nodes, by name."""
    found = await session.scalars(select(NodeRow).where(NodeRow.state != NodeStanding.READY))
    restricted = {node.id: (node, standing_at(quarantine_of(node), now)) for node in found}
    return {
        name: Avoided(standing, f"{standing}: {node.reason}")
        for name, (node, standing) in restricted.items()
        if standing is not NodeStanding.READY
    }


@dataclass(frozen=True)
class Shortcomings:
    """What makes nodes unsuitable: for every job, or for those with larger needs."""

    lacking: Mapping[str, Avoided]
    """Nodes on which no agent could run for lack of software, by name."""
    small: Sequence[tuple[str, Mapping[str, Any]]] = ()
    """(name, finding): nodes that had too little room for some job."""

    def of(self, needs: Callable[[], NodeNeeds]) -> dict[str, Avoided]:
        """The nodes that do not suit a job with these needs. `needs()` is called only if a node was
        too small for any job."""
        if not self.small:
            return dict(self.lacking)
        wanted = needs()
        least = {"shm": wanted.shm_bytes, "memory": wanted.ram_bytes, "tasks": wanted.tasks}
        small = {
            name: Avoided(NodeStanding.CORDONED, f"too small: {finding['what']}")
            for name, finding in self.small
            if finding["there"] < least.get(finding["kind"], 0)
        }
        return {**small, **self.lacking}


async def shortcomings(session: AsyncSession, since: float) -> Shortcomings:
    """The shortcomings that jobs have measured after `since`."""
    columns = select(NodeRow.id, NodeRow.findings)
    reported = [
        (name, finding)
        for name, findings in await session.execute(columns)
        for finding in findings
        if finding.get("probe") in (ROOM, SOFTWARE) and finding.get("at", 0.0) > since
    ]
    lacking = {
        name: Avoided(NodeStanding.CORDONED, f"cannot be used: {finding['what']}")
        for name, finding in reported
        if finding["probe"] == SOFTWARE
    }
    return Shortcomings(lacking, [found for found in reported if found[0] not in lacking])


async def record_seen(session: AsyncSession, seen: Iterable[NodeCapacity], now: float) -> None:
    """Record the current nodes of the cluster. Several Ray nodes on one machine count as one."""
    machines: dict[str, list[NodeCapacity]] = {}
    for ray_node in seen:
        machines.setdefault(node_name(ray_node.node_id, ray_node.host), []).append(ray_node)
    known = set(await session.scalars(select(NodeRow.id)))
    for name in sorted(machines.keys() - known):
        await _get_or_add_node(session, name, machines[name][0].host, now)
    # Skips nodes that a job's event is changing now; the next call updates them.
    rows = select(NodeRow).where(NodeRow.id.in_(machines)).with_for_update(skip_locked=True)
    for node in await session.scalars(rows):
        node.cpus = sum(ray_node.cpus for ray_node in machines[node.id])
        node.gpus = sum(ray_node.gpus for ray_node in machines[node.id])
        node.head = any(ray_node.head for ray_node in machines[node.id])
        node.last_seen = now


async def lock_nodes_of(tx: JobTransaction, events: Collection[AnyEvent]) -> None:
    """Lock all nodes that these events may concern before any event is stored. The order is by
    name, so that the transactions of two jobs cannot deadlock."""
    if not any(isinstance(event, IncidentEvent | NodeHealthEvent) for event in events):
        return
    incidents = [event.record for event in events if isinstance(event, IncidentEvent)]
    lost = [item for incident in incidents for item in _blamed(incident)]
    seats = {(item.agent, item.attempt) for item in lost}
    found: list[tuple[str, str]] = []
    for event in events:
        match event:
            case AttemptFormingEvent() | AttemptRunningEvent():
                found += [
                    (member.node_id, member.host)
                    for member in event.members
                    if (member.agent, event.attempt) in seats
                ]
            case NodeHealthEvent():
                found.append((event.node_id, event.host))
    found += (await _places_of(tx, lost)).values()
    hosts = {node_name(text(node_id), text(host)): text(host) for node_id, host in found}
    for name in sorted(hosts):
        await _get_or_add_node(tx.session, name, hosts[name], tx.now)


async def record_incident(
    tx: JobTransaction, incident: IncidentRecord, rules: QuarantineRules
) -> None:
    """Record the nodes that the incident is attributed to, and quarantine a node with too many
    incidents."""
    lost = _blamed(incident)
    places = await _places_of(tx, lost)
    blamed: dict[str, tuple[str, str]] = {}
    for item in lost:
        place = places.get((item.agent, item.attempt))
        if place is not None:
            blamed[node_name(*place)] = (place[1], text(item.cause)[:32])
    known = select(NodeTrouble.node_id, NodeTrouble.cause).where(
        NodeTrouble.job_id == tx.job.id, NodeTrouble.incident == incident.incident
    )
    stored = {(name, cause) for name, cause in await tx.session.execute(known)} if blamed else ()
    for name, (host, cause) in sorted(blamed.items()):
        if (name, cause) in stored:
            continue  # an incident is reported again with each of its changes
        node = await _get_or_add_node(tx.session, name, host, tx.now)
        await tx.session.merge(
            NodeTrouble(
                node_id=name,
                job_id=tx.job.id,
                incident=incident.incident,
                cause=cause,
                at=incident.opened_at or tx.now,
            )
        )
        new = decide_quarantine(
            quarantine_of(node), await troubles(tx.session, name), rules, tx.now
        )
        if new is not None:
            await _quarantine(tx, node, new, rules)


def _blamed(incident: IncidentRecord) -> list[LostItem]:
    """An agent lost on notice was preempted, which is not its node's fault."""
    return [item for item in incident.lost if not item.on_notice]


async def record_health(tx: JobTransaction, event: NodeHealthEvent, rules: QuarantineRules) -> None:
    """Store an agent's health report of its node, and quarantine an unfit node at once."""
    name, host = node_name(text(event.node_id), text(event.host)), text(event.host)
    node = await _get_or_add_node(tx.session, name, host, tx.now)
    about = {"job": tx.job.id, "agent": text(event.agent), "at": tx.now}
    found = [{**as_json(finding), **about} for finding in event.findings]
    node.findings = [*found, *_rooms_of_others(node, about)]
    node.measured = dict(event.measured)
    why = messages_of(
        finding for finding in event.findings if finding.probe not in (ROOM, SOFTWARE)
    )
    if why and standing_at(quarantine_of(node), tx.now) is NodeStanding.READY:
        await _quarantine(tx, node, quarantined(quarantine_of(node), why, rules, tx.now), rules)


def _rooms_of_others(node: NodeRow, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What other agents, and those of other jobs, found too small: a report of one with smaller
    needs does not answer them."""
    kept = [
        finding
        for finding in node.findings
        if finding.get("probe") == ROOM
        and (finding.get("job"), finding.get("agent")) != (about["job"], about["agent"])
        and finding.get("at", 0.0) > about["at"] - ROOM_KEPT_S
    ]
    return kept[:ROOMS_KEPT]


async def troubles(session: AsyncSession, name: str) -> list[NodeIncident]:
    """The incidents attributed to the node, newest first."""
    found = await session.scalars(
        select(NodeTrouble).where(NodeTrouble.node_id == name).order_by(NodeTrouble.at.desc())
    )
    return [NodeIncident(row.job_id, row.incident, row.cause, row.at) for row in found]


async def _places_of(
    tx: JobTransaction, lost: Collection[LostItem]
) -> dict[tuple[str | None, int | None], tuple[str, str]]:
    """(agent, attempt) → the id and host of the node that the agent was on in that attempt. Names
    and numbers that no row can have are left out."""
    wanted = {
        (item.agent, item.attempt)
        for item in lost
        if item.agent is not None
        and text(item.agent) == item.agent
        and item.attempt is not None
        and 0 <= item.attempt < 1 << 31
    }
    if not wanted:
        return {}
    seat = AttemptMember
    rows = select(seat.agent, seat.attempt, seat.node_id, seat.host).where(
        seat.job_id == tx.job.id, tuple_(seat.agent, seat.attempt).in_(wanted)
    )
    found = await tx.session.execute(rows)
    return {(agent, attempt): (node_id, host) for agent, attempt, node_id, host in found}


async def _quarantine(
    tx: JobTransaction, node: NodeRow, new: NodeDecision, rules: QuarantineRules
) -> None:
    """Quarantine the node, unless too many already are: then the nodes are hardly the cause."""
    all_nodes = list(await tx.session.scalars(select(NodeRow)))
    present = [
        other
        for other in all_nodes
        if other is node or (is_present(other, tx.now) and (other.cpus or other.gpus))
    ]
    quarantined_nodes = [
        other
        for other in present
        if standing_at(quarantine_of(other), tx.now) is NodeStanding.QUARANTINED
    ]
    if rules.leaves_enough(len(quarantined_nodes), len(present)):
        set_quarantine(node, new)
        tx.emit(NodeQuarantinedEvent(node=node.id, reason=new.reason, until=new.until))


async def _get_or_add_node(session: AsyncSession, name: str, host: str, now: float) -> NodeRow:
    """The node's row, locked; added if there is none."""
    node = await session.get(NodeRow, name, with_for_update=True)
    if node is None:
        node = NodeRow(
            id=name,
            host=host,
            cpus=0.0,
            gpus=0.0,
            first_seen=now,
            last_seen=now,
            state=NodeStanding.READY.value,
            reason="",
            since=0.0,
            until=None,
            strikes=0,
            findings=[],
            measured={},
        )
        try:
            async with session.begin_nested():
                session.add(node)
        except IntegrityError:  # another server was faster
            node = await session.get_one(NodeRow, name, with_for_update=True)
    return node
