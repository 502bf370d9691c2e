"""The operations on nodes: list, show, cordon, uncordon.

All state is read from and written to the store. Supervisors receive a decision at once if this
process drives their jobs, otherwise after the reconciler's next read of the nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.errors import InvalidTime, NodeNotFound
from holdfast_service.policy.quarantine import (
    NodeDecision,
    cordoned,
    standing_at,
    uncordoned,
)
from holdfast_service.store import nodes, queries
from holdfast_service.store.engine import Store
from holdfast_service.store.job_nodes import NodeJobs, jobs_by_node
from holdfast_service.store.models import NodeRow
from holdfast_service.views.nodes import NodeFindingView, NodeTroubleView, NodeView
from holdfast_service.views.pages import NodePage

MIN_PREFIX_LENGTH = 6
"""Shortest prefix of a node's name that is accepted for it."""
MAX_INCIDENTS_SHOWN = 50


class NodeService:
    """The operations on nodes. Calls about one node raise NodeNotFound for an unknown name."""

    def __init__(
        self, store: Store, notify: Callable[[Iterable[str]], None] = lambda _jobs: None
    ) -> None:
        """`notify(jobs)` reports to the reconciler of this process that a decision concerns these
        jobs."""
        self._store = store
        self._notify = notify

    async def list(self) -> NodePage:
        """Every node that was ever seen; present nodes first."""
        now = time.time()
        async with self._store.read() as session:
            users = await jobs_by_node(session)
            found = await session.scalars(select(NodeRow).order_by(NodeRow.id))
            views = [
                await _view(session, node, users.get(node.id, NodeJobs()), now) for node in found
            ]
        return NodePage(items=tuple(sorted(views, key=lambda view: not view.there)))

    async def get(self, name: str) -> NodeView:
        async with self._store.read() as session:
            node = await _find(session, name)
            return await self._show(session, node, time.time())

    async def cordon(self, name: str, reason: str, until: float | None) -> NodeView:
        """Place no new ranks on the node. A repeated call changes reason and end. Raises
        InvalidTime."""
        now = time.time()
        if until is not None and until <= now:
            raise InvalidTime(
                f"`until` is {now - until:.0f} s ago: give a time in the future, or none"
            )
        return await self._decide(name, lambda before: cordoned(before, reason, until, now), now)

    async def uncordon(self, name: str) -> NodeView:
        """Use a node again after a cordon or a quarantine. Idempotent."""
        now = time.time()
        return await self._decide(name, lambda before: uncordoned(before, now), now)

    async def _decide(
        self, name: str, change: Callable[[NodeDecision], NodeDecision], now: float
    ) -> NodeView:
        async with self._store.write() as session:
            node = await _find(session, name)
            await session.refresh(node, with_for_update=True)
            nodes.set_quarantine(node, change(nodes.quarantine_of(node)))
            view = await self._show(session, node, now)
        self._notify((*view.jobs, *view.standby_of))
        return view

    async def _show(self, session: AsyncSession, node: NodeRow, now: float) -> NodeView:
        users = await jobs_by_node(session)
        return await _view(session, node, users.get(node.id, NodeJobs()), now)


async def _find(session: AsyncSession, name: str) -> NodeRow:
    node = await session.get(NodeRow, name)
    if node is not None:
        return node
    has_prefix = NodeRow.id.startswith(name, autoescape=True)
    found = list(await session.scalars(select(NodeRow).where(has_prefix).limit(2)))
    if len(found) != 1 or len(name) < MIN_PREFIX_LENGTH:
        several = ": several names start with it, give more of it" if len(found) > 1 else ""
        raise NodeNotFound(f"there is no node {name}{several}")
    return found[0]


async def _view(session: AsyncSession, node: NodeRow, users: NodeJobs, now: float) -> NodeView:
    decision = nodes.quarantine_of(node)
    standing = standing_at(decision, now)
    in_force = standing is decision.state
    incidents = await nodes.troubles(session, node.id)
    return NodeView.from_attributes(
        node,
        state=standing,
        reason=(node.reason or None) if in_force else None,
        since=(node.since or None) if in_force else None,
        until=node.until if in_force else None,
        quarantines=node.strikes,
        there=nodes.is_present(node, now),
        jobs=users.ranks,
        standby_of=users.standby,
        findings=tuple(NodeFindingView(**finding) for finding in node.findings),
        memory_gb_per_s=queries.finite_metrics(node.measured),
        incidents=tuple(map(NodeTroubleView.from_attributes, incidents[:MAX_INCIDENTS_SHOWN])),
    )
