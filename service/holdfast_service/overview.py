"""What is shown of jobs and of the cluster at a glance, and of a job's life: read from the store.

Each call reads what it needs and leaves judging to pure code (`verdict.py`, `timeline.py`,
`rank_history.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service import rank_history, timeline, verdict
from holdfast_service.admission import Demand, stored_world_size
from holdfast_service.goodput import Goodput
from holdfast_service.job_lookup import find_job
from holdfast_service.kept_accounts import KeptAccounts
from holdfast_service.lifecycle import ON_CLUSTER, Desired, State
from holdfast_service.list_order import Sort
from holdfast_service.list_views import (
    ClusterCapacityView,
    ClusterView,
    JobRow,
    JobRowPage,
    QueuedJobView,
    SpecDifferenceView,
)
from holdfast_service.nodes import NodeService
from holdfast_service.placement import coordinates
from holdfast_service.quarantine import Standing, node_name
from holdfast_service.rank_views import (
    HistoryRankView,
    RankDetailView,
    RankHistoryView,
    RankMeasure,
    RankStackView,
    RanksView,
    RankView,
    RankWorkerView,
)
from holdfast_service.settings import Settings
from holdfast_service.spec_difference import differences
from holdfast_service.store import accounts, listing, rank_series, row_figures
from holdfast_service.store.engine import Store
from holdfast_service.store.models import (
    Attempt,
    AttemptMember,
    Checkpoint,
    Incident,
    Job,
    RankStates,
)
from holdfast_service.store.storable import number
from holdfast_service.story_views import (
    TimelineCheckpointView,
    TimelineIncidentView,
    TimelineView,
    VerdictView,
)
from holdfast_service.views import NodeView, WaitingView

QUEUE_SHOWN = 500
WORKERS_SHOWN = 200
STACKS_SHOWN = 20
CLUSTER_AGE_S = 2.0


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
        async with self._store.read() as session:
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
        now = time.time()
        async with self._store.read() as session:
            job = await find_job(session, job_id)
            told = await self._accounts.of(session, job)
            idle = [
                (stay.since, stay.until, stay.state)
                for stay in await accounts.stays(session, job.id, now)
                if not stay.held
            ]
            attempts = await session.execute(
                select(Attempt.forming_at, Attempt.number)
                .where(Attempt.job_id == job.id)
                .order_by(Attempt.number)
            )
            begun = [(at, number_) for at, number_ in attempts]
            incidents = await _timeline_incidents(session, job.id)
            saved = await _timeline_checkpoints(session, job.id)
        start = job.created_at if since is None else since
        end = (job.ended_at or now) if until is None else until
        return TimelineView(
            since=start,
            until=max(start, end),
            spans=tuple(timeline.ribbon(told.spans, idle, begun, start, end)),
            incidents=tuple(
                one for one in incidents if one.at <= end and (one.closed_at or end) >= start
            ),
            checkpoints=tuple(one for one in saved if start <= one.at <= end),
        )

    async def difference(self, job_id: str, against: str) -> Sequence[SpecDifferenceView]:
        """Where the specs of two jobs differ."""
        async with self._store.read() as session:
            left = await find_job(session, job_id)
            right = await find_job(session, against)
        return differences(left.spec, right.spec)

    async def ranks(self, job_id: str) -> RanksView:
        async with self._store.read() as session:
            return await ranks_view(session, await find_job(session, job_id))

    async def rank_history(
        self,
        job_id: str,
        *,
        since: float | None = None,
        until: float | None = None,
        buckets: int = 120,
        of: RankMeasure = RankMeasure.COMPUTE_S,
    ) -> RankHistoryView:
        """Of all the time that there is, if nothing else is asked for."""
        async with self._store.read() as session:
            job = await find_job(session, job_id)
            extent = await rank_series.extent(session, job.id)
            last = job.ended_at or time.time()
            start = since if since is not None else max(job.created_at, extent[0] if extent else 0)
            end = until if until is not None else min(last, extent[1] if extent else last)
            end = max(end, start + 1e-3 * buckets)
            stretch = await rank_series.read(session, job.id, start, end)
            members = await _members_between(session, job.id, start, end)
        bucket_s = (end - start) / buckets
        return await asyncio.to_thread(
            _history, of, start, end, bucket_s, buckets, stretch, members
        )

    async def rank(self, job_id: str, rank: int) -> RankDetailView:
        async with self._store.read() as session:
            job = await find_job(session, job_id)
            ranks = await ranks_view(session, job)
            workers = await _workers(session, job.id, rank)
            stacks, incidents = await _stacks(session, job.id, rank)
        return RankDetailView(
            rank=rank,
            now=next((one for one in ranks.ranks if one.rank == rank), None),
            workers=tuple(workers[:WORKERS_SHOWN]),
            stacks=tuple(stacks[:STACKS_SHOWN]),
            incidents=tuple(incidents),
            memory_bytes=None,
        )

    async def _look_at_cluster(self) -> ClusterView:
        nodes = (await self._nodes.list()).nodes
        async with self._store.read() as session:
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
    newest = await session.scalar(
        select(Incident).where(Incident.job_id == job.id).order_by(Incident.number.desc()).limit(1)
    )
    saved = await session.scalar(
        select(func.max(Checkpoint.step)).where(
            Checkpoint.job_id == job.id, Checkpoint.deleted_at.is_(None), Checkpoint.bad.is_(None)
        )
    )
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
        eta_s=row_figures.eta_s(job),
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


async def _timeline_incidents(session: AsyncSession, job_id: str) -> list[TimelineIncidentView]:
    found = await session.scalars(
        select(Incident).where(Incident.job_id == job_id).order_by(Incident.number)
    )
    return [
        TimelineIncidentView(
            number=one.number,
            at=number(one.data.get("signalled_at")) or one.opened_at,
            closed_at=one.closed_at,
            cause=str(one.data.get("cause") or "unknown"),
            decision=str(one.data["decision"]) if one.data.get("decision") else None,
        )
        for one in found
    ]


async def _timeline_checkpoints(session: AsyncSession, job_id: str) -> list[TimelineCheckpointView]:
    found = await session.execute(
        select(Checkpoint.step, Checkpoint.saved_at, Checkpoint.tier)
        .where(Checkpoint.job_id == job_id, Checkpoint.deleted_at.is_(None))
        .order_by(Checkpoint.saved_at)
    )
    return [TimelineCheckpointView(step=step, at=at, tier=tier) for step, at, tier in found]


# ---- ranks


async def ranks_view(session: AsyncSession, job: Job) -> RanksView:
    """The ranks of the job's newest attempt, as they were last seen."""
    newest = await session.get(Attempt, (job.id, job.attempt)) if job.attempt else None
    states = await session.get(RankStates, job.id)
    live = State(job.state).on_cluster
    seen: Mapping[str, Sequence[Any]] = {}
    if states is not None and states.attempt == job.attempt:
        seen = states.seen
    members = await session.scalars(
        select(AttemptMember)
        .where(AttemptMember.job_id == job.id, AttemptMember.attempt == job.attempt)
        .order_by(AttemptMember.rank)
    )
    times = [one[3] for one in seen.values() if one[3]]
    middle = float(np.median(times)) if times else None
    front = max((one[0] for one in seen.values()), default=None)
    mesh = newest.mesh if newest is not None else {}
    return RanksView(
        at=states.at if states is not None and seen else None,
        attempt=job.attempt,
        front_step=front,
        ranks=tuple(
            _rank(one, seen.get(str(one.rank)), front, middle, mesh, live=live) for one in members
        ),
    )


def _rank(
    member: AttemptMember,
    seen: Sequence[Any] | None,
    front: int | None,
    middle: float | None,
    mesh: Mapping[str, int],
    *,
    live: bool,
) -> RankView:
    step, phase, silent_s, took = seen or (None, None, None, None)
    return RankView(
        rank=member.rank,
        node=node_name(member.node_id, member.host) if member.node_id else "",
        host=member.host,
        agent=member.agent,
        worker=member.worker,
        role=member.role,
        step=step,
        phase=phase if live else None,
        lag_steps=front - step if front is not None and step is not None else None,
        step_time_s=took,
        slow_factor=round(took / middle, 3) if took and middle else None,
        silent_s=silent_s if live else None,
        coordinates=dict(zip(mesh, coordinates(member.rank, mesh), strict=True)),
    )


Members = Mapping[int, tuple[str, tuple[str, ...]]]
"""Rank -> its node, and the workers that had it, oldest first."""


async def _members_between(
    session: AsyncSession, job_id: str, since: float, until: float
) -> Members:
    """Of the attempts that were there in this time; of many, the newest."""
    attempts = await session.scalars(
        select(Attempt.number)
        .where(
            Attempt.job_id == job_id,
            Attempt.forming_at <= until,
            func.coalesce(Attempt.ended_at, until) >= since,
        )
        .order_by(Attempt.number.desc())
        .limit(_ATTEMPTS_LOOKED_AT)
    )
    place = (AttemptMember.rank, AttemptMember.worker, AttemptMember.node_id, AttemptMember.host)
    rows = await session.execute(
        select(*place)
        .where(AttemptMember.job_id == job_id, AttemptMember.attempt.in_(list(attempts)))
        .group_by(*place)  # most ranks keep their worker through all attempts
        .order_by(func.max(AttemptMember.attempt))
    )
    nodes: dict[int, str] = {}
    workers: dict[int, dict[str, None]] = defaultdict(dict)
    for rank, worker, node_id, host in rows:
        nodes[rank] = node_name(node_id, host) if node_id else ""
        workers[rank][worker] = None
    return {rank: (node, tuple(workers[rank])) for rank, node in sorted(nodes.items())}


_ATTEMPTS_LOOKED_AT = 20


def _history(
    of: RankMeasure,
    since: float,
    until: float,
    bucket_s: float,
    buckets: int,
    stretch: rank_series.Stretch | None,
    members: Members,
) -> RankHistoryView:
    measured = stretch.compute.shape[1] if stretch is not None else 0
    ranks = [rank for rank in members if rank < measured] if measured else list(members)
    ranks = ranks or list(range(measured))
    values: rank_history.Rows = tuple((None,) * buckets for _ in ranks)
    if stretch is not None and ranks:
        starts = stretch.since + stretch.width_s * np.arange(len(stretch.steps), dtype=np.float64)
        told = rank_history.measured(of, stretch, measured)
        found = rank_history.bucketed(told, starts, since, bucket_s, buckets)
        values = rank_history.plain(found[ranks])
    return RankHistoryView.model_construct(  # its hundred thousand values need no second look
        of=of,
        since=since,
        until=until,
        bucket_s=bucket_s,
        ranks=tuple(
            HistoryRankView(rank=rank, node=node, workers=workers)
            for rank in ranks
            for node, workers in (members.get(rank, ("", ())),)
        ),
        values=values,
    )


async def _workers(session: AsyncSession, job_id: str, rank: int) -> list[RankWorkerView]:
    rows = await session.execute(
        select(AttemptMember, Attempt.forming_at, Attempt.ended_at)
        .join(
            Attempt,
            (Attempt.job_id == AttemptMember.job_id) & (Attempt.number == AttemptMember.attempt),
        )
        .where(AttemptMember.job_id == job_id, AttemptMember.rank == rank)
        .order_by(AttemptMember.attempt.desc())
        .limit(WORKERS_SHOWN)
    )
    return [
        RankWorkerView(
            attempt=member.attempt,
            worker=member.worker,
            agent=member.agent,
            node=node_name(member.node_id, member.host) if member.node_id else "",
            host=member.host,
            pid=member.pid,
            since=since,
            until=until,
        )
        for member, since, until in rows
    ]


async def _stacks(
    session: AsyncSession, job_id: str, rank: int
) -> tuple[list[RankStackView], list[int]]:
    """Newest first: where the rank stood, and the incidents that it had a part in."""
    stacks: list[RankStackView] = []
    numbers: list[int] = []
    for incident in await session.scalars(
        select(Incident).where(Incident.job_id == job_id).order_by(Incident.number.desc())
    ):
        said = incident.data
        if any(rank in (one.get("ranks") or [one.get("rank")]) for one in said.get("lost") or ()):
            numbers.append(incident.number)
        stacks += [
            RankStackView(
                incident=incident.number,
                at=incident.opened_at,
                frames=tuple(map(str, one.get("frames") or ())),
            )
            for one in said.get("stacks") or ()
            if rank in (one.get("ranks") or ())
        ]
    return stacks, numbers
