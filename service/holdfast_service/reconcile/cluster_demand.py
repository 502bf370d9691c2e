"""Reads the node demand of all jobs, for the decisions about who gets nodes.

What counts is in the store, so that every server, also one that has just started, decides alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError
from sqlalchemy import ColumnElement, and_, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.admission import KEEP_PLACE, Claim, NodeDemand, times_overdue
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.node_needs import needs_of
from holdfast_service.policy.quarantine import Avoided, NodeStanding
from holdfast_service.settings import Settings
from holdfast_service.store import nodes
from holdfast_service.store.models import QUEUE_ORDER, Intent, JobRecord
from holdfast_service.store.nodes import Shortcomings
from holdfast_service.store.transaction import Effect, JobTransaction
from holdfast_workers.protocol.node_needs import NodeNeeds

T = TypeVar("T")

_QUERY_CHUNK = 500
_KEPT_OF_OTHERS = 10_000
_GROWTH_HEAD = 20
"""Jobs of the queue that an autoscaled cluster is asked for."""
_TRAINS = frozenset({State.STARTING, State.RUNNING, State.RECOVERING, State.RESIZING})
_UNSETTLED = frozenset({State.STARTING, State.RECOVERING})
"""States in which a job may have fewer nodes than it needs."""
_KEPT = Avoided(NodeStanding.CORDONED, "reserved for a job before it")


@dataclass(frozen=True)
class LiveDemand:
    """The demand of all jobs; see `plan_growth`."""

    held: tuple[Claim, ...]
    queue: tuple[Claim, ...]
    """The first ones."""
    growing: tuple[Claim, ...]
    unsettled: tuple[Claim, ...]
    """Claims of the jobs that may lack nodes, in the queue or started."""


class CompetingDemand:
    """Caches the demand of jobs that hold or await nodes: of a spec, only the token sets are added
    later, on which the needs of its model may depend."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: dict[str, NodeDemand | None] = {}
        self._needs: dict[str, NodeNeeds] = {}

    async def of_other_jobs(self, tx: JobTransaction) -> tuple[list[Claim], list[Claim]]:
        """The claims of other jobs on the cluster, and of those before this one in the queue."""
        own_place = (-tx.job.priority, tx.job.id)
        held: list[Claim] = []
        before: list[Claim] = []
        for row, claim in await self._live_jobs(tx.session, tx.now):
            if row.id == tx.job.id:
                continue
            if row.state != State.QUEUED:
                held.append(claim)
            elif (-row.priority, row.id) < own_place and _keeps_place(row.waiting):
                before.append(claim)
        return held, before

    async def of_all_jobs(
        self, session: AsyncSession, now: float, *, settled: bool = True
    ) -> LiveDemand:
        """`settled`: also of jobs that have their nodes, which may be thousands."""
        held: list[Claim] = []
        queue: list[Claim] = []
        growing: list[Claim] = []
        unsettled: list[Claim] = []
        for row, claim in await self._live_jobs(session, now, settled=settled):
            if row.state != State.QUEUED:
                held.append(claim)
                if claim.demand.least and row.state in _TRAINS:
                    growing.append(_growing(claim, row.wanted_nodes))
            elif _waits_for_growth(row.waiting) and len(queue) < _GROWTH_HEAD:
                queue.append(claim)
            in_queue = row.state == State.QUEUED and _keeps_place(row.waiting)
            if in_queue or row.state in _UNSETTLED:
                unsettled.append(claim)
        return LiveDemand(tuple(held), tuple(queue), tuple(growing), tuple(unsettled))

    def overdue(self, queued_at: float, now: float) -> int:
        """See `Claim.overdue`, of a queued job."""
        return times_overdue(now - queued_at, self._settings.reserve_after_s)

    async def shortcomings(self, session: AsyncSession, now: float) -> Shortcomings:
        """The shortcomings of nodes that count now."""
        return await nodes.shortcomings(session, now - self._settings.pace.node_room_fresh_s)

    async def _live_jobs(
        self, session: AsyncSession, now: float, *, settled: bool = True
    ) -> list[tuple[Any, Claim]]:
        """The jobs that hold or await nodes, in the order of the queue, with their claims; without
        those whose spec cannot be read."""
        columns = (JobRecord.id, JobRecord.name, JobRecord.state, JobRecord.waiting)
        orders = (JobRecord.priority, JobRecord.wanted_nodes)
        live = (
            select(*columns, *orders, JobRecord.queued_at, JobRecord.kept_off)
            .where(JobRecord.cleaned.is_(False), ~_released())
            .order_by(*QUEUE_ORDER)
        )
        if not settled:
            live = live.where(JobRecord.state.in_((State.QUEUED, *_UNSETTLED)))
        found = await session.execute(live)
        rows = [row for row in found if row.state != State.PAUSED]
        demands = await self._read_demands(session, {row.id for row in rows})
        unsuitable = await self._unsuitable(
            session, {row.id for row in rows if _may_take_nodes(row)}, now
        )
        claims: list[tuple[Any, Claim]] = []
        for row in rows:
            if (demand := demands[row.id]) is not None:
                kept_off = row.kept_off if row.state == State.STARTING else None
                unusable = {**unsuitable.get(row.id, {}), **dict.fromkeys(kept_off or (), _KEPT)}
                overdue = self.overdue(row.queued_at, now) if row.state == State.QUEUED else 0
                claims.append((row, Claim(row.id, demand, row.name, overdue, unusable)))
        return claims

    async def _read_demands(
        self, session: AsyncSession, jobs: set[str]
    ) -> dict[str, NodeDemand | None]:
        known = _kept(self._known, jobs)
        for job, spec in await _specs(session, jobs - known.keys()):
            known[job] = NodeDemand.from_stored_spec(spec)
        self._known = known
        return known

    async def _unsuitable(
        self, session: AsyncSession, jobs: set[str], now: float
    ) -> dict[str, Mapping[str, Avoided]]:
        """The nodes that do not suit each job, by job."""
        short = await self.shortcomings(session, now)
        if not short.small:
            return dict.fromkeys(jobs, short.lacking)
        known = _kept(self._needs, jobs)
        changing = set()
        for job, spec in await _specs(session, jobs - known.keys()):
            known[job] = _needs(spec)
            data, model = spec.get("data") or {}, spec.get("model") or {}
            is_unread = model.get("from") is not None and model.get("published") is None
            if is_unread or (data.get("sources") and not data.get("prepared")):  # no sizes yet
                changing.add(job)
        self._needs = {job: needs for job, needs in known.items() if job not in changing}
        return {job: short.of(partial(known.__getitem__, job)) for job in jobs}


def _kept(known: Mapping[str, T], jobs: set[str]) -> dict[str, T]:
    """The part of earlier results that is kept: a look at few jobs forgets others only if they are
    many."""
    if len(known) <= 2 * len(jobs) + _KEPT_OF_OTHERS:
        return dict(known)
    return {job: value for job, value in known.items() if job in jobs}


async def _specs(session: AsyncSession, jobs: set[str]) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    wanted = sorted(jobs)
    for start in range(0, len(wanted), _QUERY_CHUNK):
        chunk = wanted[start : start + _QUERY_CHUNK]
        rows = await session.execute(
            select(JobRecord.id, JobRecord.spec).where(JobRecord.id.in_(chunk))
        )
        found += [(job, spec) for job, spec in rows]
    return found


def _needs(spec: dict[str, Any]) -> NodeNeeds:
    """The needs of a stored spec; nothing is known of one that is not valid any more."""
    try:
        return needs_of(JobSpec.model_validate(spec))
    except ValidationError:
        return NodeNeeds()


def _growing(claim: Claim, wanted_nodes: int | None) -> Claim:
    """The claim with as many nodes as the job may have."""
    demand = claim.demand
    most = demand.nodes if wanted_nodes is None else wanted_nodes
    allowed = min(demand.nodes, most + demand.standbys)
    return replace(claim, demand=replace(demand, nodes=allowed))


def _keeps_place(waiting: dict[str, Any] | None) -> bool:
    return waiting is not None and waiting["resource"] in KEEP_PLACE


def _waits_for_growth(waiting: dict[str, Any] | None) -> bool:
    """Whether nodes would help a queued job. A node installs its packages before it is admitted; a
    cluster without nodes counts as out of reach until then."""
    return _keeps_place(waiting) or (waiting is not None and waiting["resource"] == "packages")


def _may_take_nodes(row: Any) -> bool:
    """Whether it matters which nodes suit the job. Specs of other jobs are not validated."""
    return row.state in _UNSETTLED or (row.state == State.QUEUED and _waits_for_growth(row.waiting))


def _released() -> ColumnElement[bool]:
    """The job has ended and holds nothing on the cluster; clean-up elsewhere may go on."""
    done = select(Intent.job_id).where(
        Intent.job_id == JobRecord.id, Intent.name == Effect.RELEASE, Intent.done_at.is_not(None)
    )
    return and_(JobRecord.state.in_([state for state in State if state.terminal]), done.exists())
