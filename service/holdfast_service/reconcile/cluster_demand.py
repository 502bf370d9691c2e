"""Reads the node demand of other jobs, in the transaction that decides whether a job may start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from sqlalchemy import ColumnElement, and_, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.admission import Claim, NodeDemand, reason_to_wait
from holdfast_service.job_model.cluster_growth import QueuedClaim
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.node_needs import needs_of
from holdfast_service.job_model.supervisor_protocol import Capacity
from holdfast_service.store import nodes
from holdfast_service.store.models import QUEUE_ORDER, Intent, JobRecord
from holdfast_service.store.transaction import Effect, JobTransaction

_QUERY_CHUNK = 500
_QUEUE_HEAD = 20
_TRAINS = frozenset({State.STARTING, State.RUNNING, State.RECOVERING, State.RESIZING})


@dataclass(frozen=True)
class LiveDemand:
    """The demand of all jobs; see `plan_growth`."""

    held: tuple[Claim, ...]
    queue: tuple[QueuedClaim, ...]
    """The first ones."""
    growing: tuple[Claim, ...]


class CompetingDemand:
    """Caches the demand of jobs that hold or await nodes: a spec never changes."""

    def __init__(self, reserve_after_s: float) -> None:
        """Nodes are reserved for a job that has waited for them for this long."""
        self._reserve_after_s = reserve_after_s
        self._known: dict[str, NodeDemand | None] = {}

    async def of_other_jobs(self, tx: JobTransaction) -> tuple[list[Claim], list[Claim]]:
        """The claims of other jobs on the cluster, and of those before this one in the queue."""
        own_place = (-tx.job.priority, tx.job.id)
        held: list[Claim] = []
        before: list[Claim] = []
        for row, demand in await self._live_jobs(tx.session):
            if row.id == tx.job.id:
                continue
            if row.state != State.QUEUED:
                held.append(Claim(row.id, demand, row.name))
            # Only a queued job that was tried and waits for nodes keeps its place: a job that
            # cannot be driven at all must not block the queue.
            elif (-row.priority, row.id) < own_place and _waits_for_nodes(row.waiting):
                overdue = self.is_overdue(row.waiting, tx.now)
                before.append(Claim(row.id, demand, row.name, overdue))
        return held, before

    async def of_all_jobs(
        self, session: AsyncSession, now: float, rooms_since: float
    ) -> LiveDemand:
        """`rooms_since`: nodes that were too small for a job after this time are not suitable."""
        held: list[Claim] = []
        queue: list[QueuedClaim] = []
        growing: list[Claim] = []
        for row, demand in await self._live_jobs(session):
            if row.state != State.QUEUED:
                held.append(Claim(row.id, demand, row.name))
                if demand.least and row.state in _TRAINS:
                    most = demand.nodes if row.wanted_nodes is None else row.wanted_nodes
                    allowed = min(demand.nodes, most + demand.standbys)
                    growing.append(Claim(row.id, replace(demand, nodes=allowed), row.name))
            elif _waits_for_growth(row.waiting) and len(queue) < _QUEUE_HEAD:
                overdue = self.is_overdue(row.waiting, now)
                unsuitable = await _unsuitable(session, row.id, rooms_since)
                queue.append(QueuedClaim(row.id, demand, row.name, overdue, unsuitable))
        return LiveDemand(tuple(held), tuple(queue), tuple(growing))

    async def _live_jobs(self, session: AsyncSession) -> list[tuple[Any, NodeDemand]]:
        """The jobs that hold or await nodes, in the order of the queue; without those whose spec
        cannot be read."""
        columns = (JobRecord.id, JobRecord.name, JobRecord.state, JobRecord.waiting)
        rows = await session.execute(
            select(*columns, JobRecord.priority, JobRecord.wanted_nodes)
            .where(JobRecord.cleaned.is_(False), ~_released())
            .order_by(*QUEUE_ORDER)
        )
        jobs = [row for row in rows if row.state != State.PAUSED]
        await self._read(session, {row.id for row in jobs})
        demands = ((row, self._known.get(row.id)) for row in jobs)
        return [(row, demand) for row, demand in demands if demand is not None]

    def is_overdue(self, waiting: dict[str, Any] | None, now: float) -> bool:
        """Whether a queued job has waited so long for nodes that nodes are reserved for it."""
        if waiting is None or not _waits_for_nodes(waiting):
            return False
        return bool(now - waiting["since"] > self._reserve_after_s)

    async def _read(self, session: AsyncSession, wanted: set[str]) -> None:
        known = {job: demand for job, demand in self._known.items() if job in wanted}
        missing = sorted(wanted - known.keys())
        for start in range(0, len(missing), _QUERY_CHUNK):
            chunk = missing[start : start + _QUERY_CHUNK]
            for job, spec in await session.execute(
                select(JobRecord.id, JobRecord.spec).where(JobRecord.id.in_(chunk))
            ):
                known[job] = NodeDemand.from_stored_spec(spec)
        self._known = known


async def jobs_that_lack_nodes(session: AsyncSession, capacity: Capacity) -> frozenset[str]:
    """The first jobs that lack nodes, of those for which the cluster is large enough: queued jobs
    that wait for nodes, and started jobs that are not placed yet or have lost nodes."""
    queued = await session.execute(
        select(JobRecord.id, JobRecord.waiting, JobRecord.spec)
        .where(JobRecord.state == State.QUEUED, JobRecord.cleaned.is_(False))
        .order_by(*QUEUE_ORDER)
        .limit(_QUEUE_HEAD)
    )
    wanted = {job: spec for job, waiting, spec in queued if _waits_for_nodes(waiting)}
    started = await session.execute(
        select(JobRecord.id, JobRecord.state)
        .where(JobRecord.state.in_((State.STARTING, State.RECOVERING)))
        .order_by(JobRecord.id)
    )
    unsettled = [
        job for job, state in started if state == State.RECOVERING or job not in capacity.placed
    ]
    specs = await session.execute(
        select(JobRecord.id, JobRecord.spec).where(JobRecord.id.in_(unsettled[:_QUEUE_HEAD]))
    )
    wanted |= {row.id: row.spec for row in specs}
    demands = {job: NodeDemand.from_stored_spec(spec) for job, spec in wanted.items()}
    return frozenset(
        job
        for job, demand in demands.items()
        if demand is not None
        and len(capacity.placed.get(job, ())) < demand.to_start
        and reason_to_wait(capacity, (), (), demand) is None
    )


async def _unsuitable(session: AsyncSession, job: str, since: float) -> frozenset[str]:
    """Names of the nodes that do not suit a job; none if its spec is not valid any more."""
    spec = await session.scalar(select(JobRecord.spec).where(JobRecord.id == job))
    try:
        return frozenset(
            await nodes.unsuitable(session, lambda: needs_of(JobSpec.model_validate(spec)), since)
        )
    except ValidationError:
        return frozenset()


def _waits_for_nodes(waiting: dict[str, Any] | None) -> bool:
    return waiting is not None and waiting["resource"] == "nodes"


def _waits_for_growth(waiting: dict[str, Any] | None) -> bool:
    """Whether nodes would help a queued job. A node installs its packages before it is admitted; a
    cluster without nodes counts as out of reach until then."""
    return waiting is not None and waiting["resource"] in ("nodes", "packages", "cluster")


def _released() -> ColumnElement[bool]:
    """The job has ended and holds nothing on the cluster; clean-up elsewhere may go on."""
    done = select(Intent.job_id).where(
        Intent.job_id == JobRecord.id, Intent.name == Effect.RELEASE, Intent.done_at.is_not(None)
    )
    return and_(JobRecord.state.in_([state for state in State if state.terminal]), done.exists())
