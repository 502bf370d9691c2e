"""What is shown of jobs and of the cluster at a glance, and of a job's life: read from the store.

Each call reads what it needs and leaves judging to pure code (`readers/verdict.py`,
`readers/timeline.py`, `readers/rank_heatmap.py`). What is read of ranks is in `readers/ranks.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.admission import Demand, stored_world_size
from holdfast_service.job_model.goodput import Goodput
from holdfast_service.job_model.lifecycle import ON_CLUSTER, Desired, State
from holdfast_service.job_model.sort_order import Sort
from holdfast_service.policy.quarantine import Standing
from holdfast_service.readers import ranks as rank_reading
from holdfast_service.readers import timeline, verdict
from holdfast_service.readers.goodput_cache import KeptAccounts
from holdfast_service.readers.ranks import Asked, Recorded
from holdfast_service.readers.spec_diff import differences
from holdfast_service.services.nodes import NodeService
from holdfast_service.settings import Settings
from holdfast_service.store import accounts, job_row_stats, listing, queries
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import find_job
from holdfast_service.store.json_safe import number
from holdfast_service.store.models import Attempt, Checkpoint, Incident, Job
from holdfast_service.store.statement import JOB, Statement
from holdfast_service.views.jobs import NodeView, WaitingView
from holdfast_service.views.lists import (
    ClusterCapacityView,
    ClusterView,
    JobRow,
    JobRowPage,
    QueuedJobView,
    SpecDifferenceView,
)
from holdfast_service.views.ranks import RankDetailView, RankHeatView, RankHistoryView, RanksView
from holdfast_service.views.timeline import (
    GlanceView,
    TimelineCheckpointView,
    TimelineIncidentView,
    TimelineView,
    VerdictView,
)

QUEUE_SHOWN = 500
STACKS_SHOWN = 20
CLUSTER_AGE_S = 2.0
_DRAWN_AT_ONCE = 4096
"""Values of a history of ranks: that takes less time than a thread's turn."""

T = TypeVar("T")
D = TypeVar("D")

_NEWEST_INCIDENT = Statement(
    select(Incident).where(Incident.job_id == JOB).order_by(Incident.number.desc()).limit(1)
)
_NEWEST_CHECKPOINT = Statement(
    select(func.max(Checkpoint.step)).where(
        Checkpoint.job_id == JOB, Checkpoint.deleted_at.is_(None), Checkpoint.bad.is_(None)
    )
)
_ATTEMPTS = Statement(
    select(Attempt.forming_at, Attempt.number).where(Attempt.job_id == JOB).order_by(Attempt.number)
)
_CHECKPOINTS = Statement(
    select(Checkpoint.step, Checkpoint.saved_at, Checkpoint.tier)
    .where(Checkpoint.job_id == JOB, Checkpoint.deleted_at.is_(None))
    .order_by(Checkpoint.saved_at)
)


class Overview:
    """Calls about one job raise JobNotFound for an id that was never given out."""

    def __init__(
        self,
        store: Store,
        nodes: NodeService,
        settings: Settings,
        accounts: KeptAccounts | None = None,
    ) -> None:
        self._store = store
        self._nodes = nodes
        self._settings = settings
        self._accounts = accounts or KeptAccounts()
        self._cluster: tuple[float, ClusterView] | None = None
        self._looking = asyncio.Lock()

    async def rows(
        self,
        *,
        q: str | None = None,
        owner: str | None = None,
        states: Collection[State] = (),
        sort: Sort = Sort.CREATED,
        limit: int = 50,
        cursor: str | None = None,
    ) -> JobRowPage:
        """Raises InvalidCursor."""
        filters = listing.Filters(q=q, owner=owner, states=frozenset(states))
        everything = bool(q or owner) or sort is not Sort.CREATED  # all jobs are looked at
        async with self._store.read(long=everything) as session:
            return await listing.page(session, filters, sort, limit, cursor)

    async def row(self, job_id: str) -> JobRow:
        async with self._store.read() as session:
            return listing.row(await find_job(session, job_id))

    async def cluster(self) -> ClusterView:
        """As it was at most `CLUSTER_AGE_S` ago: many may watch, one looks."""
        async with self._looking:
            known = self._cluster
            if known is None or time.monotonic() - known[0] > CLUSTER_AGE_S:
                known = self._cluster = (time.monotonic(), await self._look_at_cluster())
        return known[1]

    async def verdict(self, job_id: str) -> VerdictView:
        async with self._store.read() as session:
            job = await find_job(session, job_id)
            told = await self._accounts.of(session, job)
            return verdict.verdict(await _standing(session, job, told, time.time()))

    async def timeline(
        self, job_id: str, since: float | None = None, until: float | None = None
    ) -> TimelineView:
        """From the job's submission until it ended, or now, if nothing else is asked for."""
        async with self._store.read() as session:
            job = await find_job(session, job_id)
            told = await self._accounts.of(session, job)
            return await _timeline(session, job, told, time.time(), since, until)

    async def difference(self, job_id: str, against: str) -> Sequence[SpecDifferenceView]:
        """Where the specs of two jobs differ."""
        async with self._store.read() as session:
            left = await find_job(session, job_id)
            right = await find_job(session, against)
        return differences(left.spec, right.spec)

    async def ranks(self, job_id: str) -> RanksView:
        async with self._store.read() as session:
            return await rank_reading.ranks_view(session, await find_job(session, job_id))

    async def rank_history(self, job_id: str, asked: Asked) -> RankHistoryView:
        async with self._store.read() as session:
            job = await find_job(session, job_id)
            told = await rank_reading.recorded(session, job, asked)
            members = await rank_reading.members_between(session, job.id, told.since, told.until)
        return await _drawn(rank_reading.history, told, members)

    async def heat(self, job_id: str, asked: Asked) -> RankHeatView:
        async with self._store.read() as session:
            job = await find_job(session, job_id)
            told, places = await _told_of_ranks(session, job, asked)
        return await _drawn(rank_reading.heat, told, places)

    async def glance(self, job_id: str, asked: Asked) -> GlanceView:
        """All that a page about the job shows first, as of one moment; of its ranks what is
        `asked`, the rest of its whole life."""
        now = time.time()
        async with self._store.read() as session:
            job = await find_job(session, job_id)
            ranks = await _told_of_ranks(session, job, asked)
            drawing = asyncio.create_task(_drawn(rank_reading.heat, *ranks))
            try:
                told = await self._accounts.of(session, job)
                return GlanceView(
                    job=await queries.job_view(session, job),
                    verdict=verdict.verdict(await _standing(session, job, told, now)),
                    timeline=await _timeline(session, job, told, now),
                    heat=await drawing,
                )
            finally:
                await asyncio.wait([drawing])

    async def rank(self, job_id: str, rank: int) -> RankDetailView:
        async with self._store.read() as session:
            job = await find_job(session, job_id)
            ranks = await rank_reading.ranks_view(session, job)
            workers = await rank_reading.workers(session, job.id, rank)
            stacks, incidents = await rank_reading.stacks(session, job.id, rank)
        return RankDetailView(
            rank=rank,
            now=next((one for one in ranks.ranks if one.rank == rank), None),
            workers=tuple(workers),
            stacks=tuple(stacks[:STACKS_SHOWN]),
            incidents=tuple(incidents),
            memory_bytes=None,
        )

    async def _look_at_cluster(self) -> ClusterView:
        nodes = (await self._nodes.list()).nodes
        async with self._store.read(long=True) as session:
            waiting = (
                await session.execute(
                    select(Job.id, Job.name, Job.created_at, Job.waiting)
                    .where(Job.state == State.QUEUED)
                    .order_by(Job.id)
                    .limit(QUEUE_SHOWN)
                )
            ).all()
            queued = await session.scalar(
                select(func.count()).select_from(Job).where(Job.state == State.QUEUED)
            )
            held = list(
                await session.scalars(select(Job.spec).where(Job.state.in_(list(ON_CLUSTER))))
            )
        return ClusterView(
            nodes=nodes,
            queue=tuple(
                QueuedJobView(
                    job=one.id,
                    name=one.name,
                    since=one.created_at,
                    waiting=WaitingView(**one.waiting) if one.waiting else None,
                )
                for one in waiting
            ),
            queued=queued or 0,
            capacity=_capacity(nodes, held),
            fault_injection=self._settings.allow_fault_injection,
        )


def _capacity(nodes: Sequence[NodeView], specs: Sequence[dict[str, Any]]) -> ClusterCapacityView:
    able = [one for one in nodes if one.there and one.state is Standing.READY]
    cpus, gpus = sum(one.cpus for one in able), sum(one.gpus for one in able)
    held = [one for one in map(Demand.stored, specs) if one is not None]
    held_cpus = sum(one.nodes * one.cpus for one in held)
    held_gpus = sum(one.nodes * one.gpus for one in held)
    return ClusterCapacityView(
        nodes=len(able),
        cpus=cpus,
        gpus=gpus,
        free_nodes=sum(not one.jobs for one in able),
        free_cpus=max(0.0, cpus - held_cpus),
        free_gpus=max(0.0, gpus - held_gpus),
    )


async def _standing(session: AsyncSession, job: Job, told: Goodput, now: float) -> verdict.Standing:
    newest = await _NEWEST_INCIDENT.first(session, job=job.id)
    saved = await _NEWEST_CHECKPOINT.value(session, job=job.id)
    state = State(job.state)
    waiting = job.waiting if not state.terminal else None
    return verdict.Standing(
        state=state,
        desired=Desired(job.desired),
        now=now,
        created_at=job.created_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        step=job.step,
        steps=job.steps,
        attempt=job.attempt,
        devices=stored_world_size(job.spec),
        waiting_for=waiting["reason"] if waiting else None,
        waiting_until=waiting["until"] if waiting else None,
        incidents=job.incidents,
        last=_last_incident(newest) if newest is not None else None,
        slow_ranks=tuple(sorted(int(rank) for rank in job.slow)) if state.on_cluster else (),
        saved_step=saved,
        outcome_code=job.outcome_code,
        outcome_message=job.outcome_message or "",
        eta_s=job_row_stats.eta_s(job),
        goodput=told.goodput,
        held_s=told.held_s,
        lost_s=sum(told.lost_s.values()),
        told_at=job.told_at,
    )


def _last_incident(incident: Incident) -> verdict.LastIncident:
    said = incident.data
    lost = said.get("steps_lost")
    return verdict.LastIncident(
        number=incident.number,
        cause=str(said.get("cause") or "unknown"),
        closed_at=incident.closed_at,
        opened_at=incident.opened_at,
        decision=str(said["decision"]) if said.get("decision") else None,
        steps_lost=lost if isinstance(lost, int) else None,
        total_s=number((said.get("phases_s") or {}).get("total")),
    )


async def _timeline(
    session: AsyncSession,
    job: Job,
    told: Goodput,
    now: float,
    since: float | None = None,
    until: float | None = None,
) -> TimelineView:
    idle = [
        (stay.since, stay.until, stay.state)
        for stay in await accounts.stays(session, job.id, now)
        if not stay.held
    ]
    begun = [(at, number_) for at, number_ in await _ATTEMPTS.all(session, job=job.id)]
    start = job.created_at if since is None else since
    end = (job.ended_at or now) if until is None else until
    return TimelineView(
        since=start,
        until=max(start, end),
        spans=tuple(timeline.ribbon(told.spans, idle, begun, start, end)),
        incidents=tuple(
            one
            for one in await _timeline_incidents(session, job.id)
            if one.at <= end and (one.closed_at or end) >= start
        ),
        checkpoints=tuple(
            one for one in await _timeline_checkpoints(session, job.id) if start <= one.at <= end
        ),
    )


async def _timeline_incidents(session: AsyncSession, job_id: str) -> list[TimelineIncidentView]:
    return [
        TimelineIncidentView(
            number=one.number,
            at=number(one.data.get("signalled_at")) or one.opened_at,
            closed_at=one.closed_at,
            cause=str(one.data.get("cause") or "unknown"),
            decision=str(one.data["decision"]) if one.data.get("decision") else None,
        )
        for one in await queries.INCIDENTS.all(session, job=job_id)
    ]


async def _timeline_checkpoints(session: AsyncSession, job_id: str) -> list[TimelineCheckpointView]:
    found = await _CHECKPOINTS.all(session, job=job_id)
    return [TimelineCheckpointView(step=step, at=at, tier=tier) for step, at, tier in found]


async def _drawn(draw: Callable[[Recorded, T], D], told: Recorded, ranks: T) -> D:
    """What is large is drawn in a thread: others need not wait for it."""
    if told.measured * told.buckets <= _DRAWN_AT_ONCE:
        return draw(told, ranks)
    return await asyncio.to_thread(draw, told, ranks)


async def _told_of_ranks(
    session: AsyncSession, job: Job, asked: Asked
) -> tuple[Recorded, dict[int, str]]:
    told = await rank_reading.recorded(session, job, asked)
    return told, await rank_reading.places_between(session, job.id, told.since, told.until)
