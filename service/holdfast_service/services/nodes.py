"""What one may do with nodes: look at them, set them aside, take them back.

Everything is read from and written to the store. Supervisors hear of it at once where this process
drives their jobs, otherwise with the next look at the nodes and the poll after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.job_errors import InvalidTime, NodeNotFound
from holdfast_service.job_model.lifecycle import TERMINAL
from holdfast_service.policy.quarantine import Standings, cordoned, lifted, node_name, present
from holdfast_service.store import nodes, queries
from holdfast_service.store.engine import Store
from holdfast_service.store.models import AttemptMember, Job, Node
from holdfast_service.views.jobs import NodeFindingView, NodePage, NodeTroubleView, NodeView

SHORTEST_NAME = 6
"""Characters of a name's beginning that may stand for it."""
TROUBLES_SHOWN = 50


class NodeService:
    """Calls about one node raise NodeNotFound for a name that no node has."""

    def __init__(
        self, store: Store, ring: Callable[[Iterable[str]], None] = lambda _jobs: None
    ) -> None:
        """`ring(jobs)`: what was decided concerns these jobs, for a reconciler in this process."""
        self._store = store
        self._ring = ring

    async def list(self) -> NodePage:
        """Every node that was ever seen, those that are there first."""
        now = time.time()
        async with self._store.read() as session:
            users = await _users(session)
            found = await session.scalars(select(Node).order_by(Node.id))
            views = [await _view(session, node, users.get(node.id, ()), now) for node in found]
        return NodePage(nodes=tuple(sorted(views, key=lambda one: not one.there)))

    async def get(self, name: str) -> NodeView:
        async with self._store.read() as session:
            node = await _find(session, name)
            return await self._look(session, node, time.time())

    async def cordon(self, name: str, reason: str, until: float | None) -> NodeView:
        """Let no new rank be seated there; again changes reason and time. Raises InvalidTime."""
        now = time.time()
        if until is not None and until <= now:
            raise InvalidTime(f"`until` is {now - until:.0f} s ago: give a time to come, or none")
        return await self._decide(name, lambda before: cordoned(before, reason, until, now), now)

    async def uncordon(self, name: str) -> NodeView:
        """Take a node back, whoever had set it aside; again is the same."""
        now = time.time()
        return await self._decide(name, lambda before: lifted(before, now), now)

    async def _decide(
        self, name: str, how: Callable[[Standings], Standings], now: float
    ) -> NodeView:
        async with self._store.write() as session:
            node = await _find(session, name)
            await session.refresh(node, with_for_update=True)
            nodes.decide(node, how(nodes.decided(node)))
            view = await self._look(session, node, now)
        self._ring(view.jobs)
        return view

    async def _look(self, session: AsyncSession, node: Node, now: float) -> NodeView:
        users = await _users(session)
        return await _view(session, node, users.get(node.id, ()), now)


async def _find(session: AsyncSession, name: str) -> Node:
    node = await session.get(Node, name)
    if node is not None:
        return node
    begins = Node.id.startswith(name, autoescape=True)
    found = list(await session.scalars(select(Node).where(begins).limit(2)))
    if len(found) != 1 or len(name) < SHORTEST_NAME:
        several = ": the beginning of several names" if len(found) > 1 else ""
        raise NodeNotFound(f"there is no node {name}{several}")
    return found[0]


async def _users(session: AsyncSession) -> dict[str, tuple[str, ...]]:
    """Node → jobs that have ranks there now."""
    rows = await session.execute(
        select(AttemptMember.job_id, AttemptMember.node_id, AttemptMember.host)
        .join(Job, Job.id == AttemptMember.job_id)
        .where(Job.state.not_in(list(TERMINAL)), AttemptMember.attempt == Job.attempt)
        .order_by(AttemptMember.job_id)
        .distinct()
    )
    found: dict[str, tuple[str, ...]] = {}
    for job, node_id, host in rows:
        name = node_name(node_id, host)
        if job not in found.get(name, ()):
            found[name] = (*found.get(name, ()), job)
    return found


async def _view(session: AsyncSession, node: Node, jobs: tuple[str, ...], now: float) -> NodeView:
    decided = nodes.decided(node)
    standing = present(decided, now)
    in_force = standing is decided.state
    troubles = await nodes.troubles(session, node.id)
    return NodeView(
        id=node.id,
        host=node.host,
        state=standing,
        reason=(node.reason or None) if in_force else None,
        since=(node.since or None) if in_force else None,
        until=node.until if in_force else None,
        quarantines=node.strikes,
        there=nodes.is_there(node, now),
        cpus=node.cpus,
        gpus=node.gpus,
        first_seen=node.first_seen,
        last_seen=node.last_seen,
        jobs=jobs,
        findings=tuple(NodeFindingView(**one) for one in node.findings),
        memory_gb_per_s=queries.finite(node.measured),
        incidents=tuple(
            NodeTroubleView(job=one.job, incident=one.incident, cause=one.cause, at=one.at)
            for one in troubles[:TROUBLES_SHOWN]
        ),
    )
