"""Nodes in the store: who was seen, what befell them, and which of them are set aside.

What is decided about a node is decided by `policy/quarantine.py`, in the transaction that brings
the news.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from sqlalchemy import select, tuple_
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.supervisor_protocol import EventKind, NodeCapacity, SupervisorEvent
from holdfast_service.policy.quarantine import (
    Avoided,
    QuarantineRules,
    Standing,
    Standings,
    Trouble,
    after_trouble,
    node_name,
    present,
    quarantined,
)
from holdfast_service.store.json_safe import text
from holdfast_service.store.models import AttemptMember, Node, NodeTrouble
from holdfast_service.store.transaction import JobTransaction
from holdfast_workers.health.findings import Finding, in_words

OF_NODES = frozenset(
    {
        EventKind.INCIDENT_OPENED,
        EventKind.INCIDENT_UPDATED,
        EventKind.INCIDENT_CLOSED,
        EventKind.NODE_HEALTH,
    }
)
"""Events that speak of nodes."""

GONE_AFTER_S = 30.0
"""A node that was not seen for so long is not there any more."""


def decided(node: Node) -> Standings:
    return Standings(Standing(node.state), node.reason, node.since, node.until, node.strikes)


def decide(node: Node, new: Standings) -> None:
    node.state, node.reason = new.state, text(new.reason)
    node.since, node.until, node.strikes = new.since, new.until, new.strikes


def is_there(node: Node, now: float) -> bool:
    return node.last_seen > now - GONE_AFTER_S


async def avoided(session: AsyncSession, now: float) -> dict[str, Avoided]:
    """The nodes that are set aside, by name."""
    found = await session.scalars(select(Node).where(Node.state != Standing.READY))
    aside = {node.id: (node, present(decided(node), now)) for node in found}
    return {
        name: Avoided(standing, f"{standing}: {node.reason}")
        for name, (node, standing) in aside.items()
        if standing is not Standing.READY
    }


async def saw(session: AsyncSession, seen: Iterable[NodeCapacity], now: float) -> None:
    """These are the nodes of the cluster; several of Ray's on one machine are one."""
    machines: dict[str, list[NodeCapacity]] = {}
    for one in seen:
        machines.setdefault(node_name(one.node_id, one.host), []).append(one)
    known = set(await session.scalars(select(Node.id)))
    for name in sorted(machines.keys() - known):
        await _node(session, name, machines[name][0].host, now)
    # One that a job's news is about to change is seen the next time: nobody waits for it here.
    rows = select(Node).where(Node.id.in_(machines)).with_for_update(skip_locked=True)
    for node in await session.scalars(rows):
        node.cpus = sum(one.cpus for one in machines[node.id])
        node.gpus = sum(one.gpus for one in machines[node.id])
        node.last_seen = now


async def lock_named(tx: JobTransaction, events: Collection[SupervisorEvent]) -> None:
    """Lock all nodes that these events may speak of before any of them is stored, in the order of
    their names: or the news of two jobs could wait for each other."""
    if not any(event.kind in OF_NODES for event in events):
        return
    hosts: dict[str, str] = {}
    lost = [one for event in events for one in _dicts(event.data.get("lost"))]
    places = [one for event in events for one in (event.data, *_dicts(event.data.get("members")))]
    found = [(one.get("node_id"), one.get("host")) for one in places]
    found += [(one.node_id, one.host) for one in (await _members_of(tx, lost)).values()]
    for node_id, host in found:
        if isinstance(node_id, str) and isinstance(host, str):
            hosts[node_name(text(node_id), text(host))] = text(host)
    for name in sorted(hosts):
        await _node(tx.session, name, hosts[name], tx.now)


def _dicts(listed: Any) -> list[dict[str, Any]]:
    """What is as it should be of what an event lists."""
    listed = listed if isinstance(listed, list | tuple) else ()
    return [one for one in listed if isinstance(one, dict)]


async def note_incident(tx: JobTransaction, said: dict[str, Any], rules: QuarantineRules) -> None:
    """Remember whom the incident, as it is told now, puts down to a node, and set aside whoever
    had too many."""
    lost = [one for one in said.get("lost") or () if not one.get("on_notice")]  # or taken away
    members = await _members_of(tx, lost)
    blamed: dict[str, tuple[AttemptMember, str]] = {}
    for one in lost:
        member = members.get((one.get("agent"), one.get("attempt")))
        if member is not None:
            blamed[node_name(member.node_id, member.host)] = (member, text(one["cause"])[:32])
    known = select(NodeTrouble.node_id, NodeTrouble.cause).where(
        NodeTrouble.job_id == tx.job.id, NodeTrouble.incident == said["incident"]
    )
    stored = {(name, cause) for name, cause in await tx.session.execute(known)} if blamed else ()
    for name, (member, cause) in sorted(blamed.items()):
        if (name, cause) in stored:
            continue  # an incident is told again with each turn that it takes
        node = await _node(tx.session, name, member.host, tx.now)
        await tx.session.merge(
            NodeTrouble(
                node_id=name,
                job_id=tx.job.id,
                incident=said["incident"],
                cause=cause,
                at=said.get("opened_at") or tx.now,
            )
        )
        await tx.session.flush()
        new = after_trouble(decided(node), await troubles(tx.session, name), rules, tx.now)
        if new is not None:
            await _set_aside(tx, node, new, rules)


async def note_health(tx: JobTransaction, said: dict[str, Any], rules: QuarantineRules) -> None:
    """What an agent finds of its node; an unfit one is set aside at once."""
    node = await _node(
        tx.session, node_name(text(said["node_id"]), text(said["host"])), said["host"], tx.now
    )
    findings = [Finding.from_data(one) for one in said["findings"]]
    node.findings = [one.data() for one in findings]
    node.measured = dict(said.get("measured") or {})
    why = in_words(findings)
    if why and present(decided(node), tx.now) is Standing.READY:
        await _set_aside(tx, node, quarantined(decided(node), why, rules, tx.now), rules)


async def troubles(session: AsyncSession, name: str) -> list[Trouble]:
    """Newest first."""
    found = await session.scalars(
        select(NodeTrouble).where(NodeTrouble.node_id == name).order_by(NodeTrouble.at.desc())
    )
    return [Trouble(one.job_id, one.incident, one.cause, one.at) for one in found]


async def _members_of(
    tx: JobTransaction, lost: list[dict[str, Any]]
) -> dict[tuple[Any, Any], AttemptMember]:
    """(agent, attempt) → one of the ranks that the agent had in that attempt: it tells where the
    agent was. What cannot be an agent or an attempt is left out."""
    asked = {
        (one["agent"], one["attempt"])
        for one in lost
        if isinstance(one.get("agent"), str)
        and text(one["agent"]) == one["agent"]
        and type(one.get("attempt")) is int
        and 0 <= one["attempt"] < 1 << 31
    }
    if not asked:
        return {}
    rows = select(AttemptMember).where(
        AttemptMember.job_id == tx.job.id,
        tuple_(AttemptMember.agent, AttemptMember.attempt).in_(asked),
    )
    return {(one.agent, one.attempt): one for one in await tx.session.scalars(rows)}


async def _set_aside(
    tx: JobTransaction, node: Node, new: Standings, rules: QuarantineRules
) -> None:
    """Unless too many are: then it is hardly the nodes' fault."""
    everybody = list(await tx.session.scalars(select(Node)))
    there = [
        one
        for one in everybody
        if one is node or (is_there(one, tx.now) and (one.cpus or one.gpus))
    ]
    aside = [one for one in there if present(decided(one), tx.now) is Standing.QUARANTINED]
    if rules.leaves_enough(len(aside), len(there)):
        decide(node, new)
        tx.emit("node.quarantined", {"node": node.id, "reason": new.reason, "until": new.until})


async def _node(session: AsyncSession, name: str, host: str, now: float) -> Node:
    """The node's row, locked; made if there is none."""
    node = await session.get(Node, name, with_for_update=True)
    if node is None:
        node = Node(
            id=name,
            host=host,
            cpus=0.0,
            gpus=0.0,
            first_seen=now,
            last_seen=now,
            state=Standing.READY.value,
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
            node = await session.get_one(Node, name, with_for_update=True)
    return node
