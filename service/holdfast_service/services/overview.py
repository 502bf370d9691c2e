"""The overviews of jobs and of the cluster, and of one job's history, read from the store.

Each call reads its rows and leaves the evaluation to pure code (`readers/verdict.py`,
`readers/timeline.py`, `readers/rank_heatmap.py`). The rows of ranks are read in `readers/ranks.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model import program_levels
from holdfast_service.job_model.admission import NodeDemand, ranks_per_node
from holdfast_service.job_model.events.codec import read_incident
from holdfast_service.job_model.events.incidents import IncidentRecord
from holdfast_service.job_model.goodput import Goodput
from holdfast_service.job_model.lifecycle import ON_CLUSTER, Desired, State
from holdfast_service.job_model.program_levels import ProgramLevel, has_goodput
from holdfast_service.job_model.sort_order import Sort
from holdfast_service.job_model.world_history import FormedWorld, mesh_changes, world_periods
from holdfast_service.policy.causes import Cause
from holdfast_service.policy.quarantine import NodeStanding
from holdfast_service.readers import ranks as rank_reading
from holdfast_service.readers import timeline, verdict
from holdfast_service.readers.goodput_cache import GoodputCache
from holdfast_service.readers.ranks import RankHistoryQuery, RecordedRanks
from holdfast_service.services.nodes import NodeService
from holdfast_service.settings import Settings
from holdfast_service.store import accounts, job_row_stats, listing, queries
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import find_job, read_job
from holdfast_service.store.json_safe import number
from holdfast_service.store.listing import Filters
from holdfast_service.store.models import (
    QUEUE_ORDER,
    AttemptRow,
    Checkpoint,
    IncidentRow,
    JobRecord,
)
from holdfast_service.store.statement import JOB, Statement
from holdfast_service.views.incident_facts import Fact, facts_of
from holdfast_service.views.jobs import WaitingView
from holdfast_service.views.lists import (
    ClusterCapacityView,
    ClusterView,
    JobRow,
    QueuedJobView,
    differences,
)
from holdfast_service.views.nodes import NodeView
from holdfast_service.views.pages import JobPage, SpecDifferencePage
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
_MAX_INLINE_VALUES = 4096
"""A rank history with at most so many values is rendered faster than a thread would start."""

T = TypeVar("T")
D = TypeVar("D")

_NEWEST_INCIDENT = Statement(
    select(IncidentRow)
    .where(IncidentRow.job_id == JOB)
    .order_by(IncidentRow.number.desc())
    .limit(1)
)
_INCIDENTS = Statement(select(IncidentRow).where(IncidentRow.job_id == JOB))
_NEWEST_CHECKPOINT = Statement(
    select(Checkpoint)
    .where(Checkpoint.job_id == JOB, Checkpoint.deleted_at.is_(None), Checkpoint.bad.is_(None))
    .order_by(Checkpoint.step.desc(), Checkpoint.attempt.desc())
    .limit(1)
)
_ATTEMPTS = Statement(
    select(AttemptRow.forming_at, AttemptRow.number)
    .where(AttemptRow.job_id == JOB)
    .order_by(AttemptRow.number)
)
_CHECKPOINTS = Statement(
    select(Checkpoint.step, Checkpoint.saved_at, Checkpoint.tier)
    .where(Checkpoint.job_id == JOB, Checkpoint.deleted_at.is_(None))
    .order_by(Checkpoint.saved_at)
)


class Overview:
    """The overviews. Calls about one job raise JobNotFound for an id that belongs to no job."""

    def __init__(
        self,
        store: Store,
        nodes: NodeService,
        settings: Settings,
        accounts: GoodputCache | None = None,
    ) -> None:
        self._store = store
        self._nodes = nodes
        self._settings = settings
        self._accounts = accounts or GoodputCache()
        self._cluster: tuple[float, ClusterView] | None = None
        self._cluster_lock = asyncio.Lock()

    async def rows(
        self,
        filters: Filters | None = None,
        *,
        sort: Sort = Sort.CREATED,
        limit: int = 50,
        cursor: str | None = None,
    ) -> JobPage:
        """Raises InvalidCursor."""
        filters = filters or Filters()
        # Whether the query scans all jobs.
        scans_all = bool(filters.q or filters.owner or filters.name) or sort is not Sort.CREATED
        async with self._store.read(long=scans_all) as session:
            return await listing.page(session, filters, sort, limit, cursor)

    async def row(self, job_id: str) -> JobRow:
        async with self._store.read() as session:
            return listing.row(await find_job(session, job_id))

    async def cluster(self) -> ClusterView:
        """The cluster's state, at most `CLUSTER_AGE_S` old: all viewers share one read."""
        async with self._cluster_lock:
            known = self._cluster
            if known is None or time.monotonic() - known[0] > CLUSTER_AGE_S:
                known = self._cluster = (time.monotonic(), await self._read_cluster())
        return known[1]

    async def verdict(self, job_id: str) -> VerdictView:
        folder = self._settings.program_folder(job_id)
        async with read_job(self._store, job_id) as (session, job):
            account = await self._accounts.get(session, job)
            return verdict.verdict(await _standing(session, job, account, time.time(), folder))

    async def timeline(
        self, job_id: str, since: float | None = None, until: float | None = None
    ) -> TimelineView:
        """The job's timeline, by default from its submission until its end, or until now."""
        async with read_job(self._store, job_id) as (session, job):
            account = await self._accounts.get(session, job)
            return await _timeline(session, job, account, time.time(), since, until)

    async def difference(self, job_id: str, against: str) -> SpecDifferencePage:
        """The fields in which the specs of two jobs differ."""
        async with self._store.read() as session:
            left = await find_job(session, job_id)
            right = await find_job(session, against)
        return SpecDifferencePage(items=tuple(differences(left.spec, right.spec)))

    async def ranks(self, job_id: str) -> RanksView:
        async with self._store.read() as session:
            return await rank_reading.ranks_view(session, await find_job(session, job_id))

    async def rank_history(self, job_id: str, query: RankHistoryQuery) -> RankHistoryView:
        async with read_job(self._store, job_id) as (session, job):
            recorded = await rank_reading.read_recorded(session, job, query)
            members = await rank_reading.nodes_and_workers_between(
                session, job.id, recorded.since, recorded.until
            )
        return await _render(rank_reading.history_view, recorded, members)

    async def heat(self, job_id: str, query: RankHistoryQuery) -> RankHeatView:
        async with read_job(self._store, job_id) as (session, job):
            recorded, places = await _recorded_ranks(session, job, query)
        return await _render(rank_reading.heat_view, recorded, places)

    async def glance(self, job_id: str, query: RankHistoryQuery) -> GlanceView:
        """Everything that the job's page shows first, as of one moment: the ranks for `query`, the
        rest for the job's whole life."""
        now = time.time()
        async with read_job(self._store, job_id) as (session, job):
            ranks = await _recorded_ranks(session, job, query)
            rendering = asyncio.create_task(_render(rank_reading.heat_view, *ranks))
            try:
                account = await self._accounts.get(session, job)
                folder = self._settings.program_folder(job_id)
                return GlanceView(
                    job=await queries.job_view(session, job),
                    verdict=verdict.verdict(await _standing(session, job, account, now, folder)),
                    timeline=await _timeline(session, job, account, now),
                    heat=await rendering,
                )
            finally:
                await asyncio.wait([rendering])

    async def rank(self, job_id: str, rank: int) -> RankDetailView:
        async with read_job(self._store, job_id) as (session, job):
            ranks = await rank_reading.ranks_view(session, job)
            workers = await rank_reading.rank_workers(session, job.id, rank)
            stacks, incidents = await rank_reading.rank_stacks(session, job.id, rank)
        return RankDetailView(
            rank=rank,
            now=next((view for view in ranks.ranks if view.rank == rank), None),
            workers=tuple(workers),
            stacks=tuple(stacks[:STACKS_SHOWN]),
            incidents=tuple(incidents),
            memory_bytes=None,
        )

    async def _read_cluster(self) -> ClusterView:
        nodes = (await self._nodes.list()).items
        async with self._store.read(long=True) as session:
            waiting = (
                await session.execute(
                    select(
                        JobRecord.id,
                        JobRecord.name,
                        JobRecord.priority,
                        JobRecord.created_at,
                        JobRecord.waiting,
                    )
                    .where(JobRecord.state == State.QUEUED)
                    .order_by(*QUEUE_ORDER)
                    .limit(QUEUE_SHOWN)
                )
            ).all()
            queued = await session.scalar(
                select(func.count()).select_from(JobRecord).where(JobRecord.state == State.QUEUED)
            )
            held = list(
                await session.scalars(
                    select(JobRecord.spec).where(JobRecord.state.in_(list(ON_CLUSTER)))
                )
            )
        return ClusterView(
            nodes=nodes,
            queue=tuple(
                QueuedJobView(
                    place=place,
                    job=row.id,
                    name=row.name,
                    priority=row.priority,
                    since=row.created_at,
                    waiting=WaitingView(**row.waiting) if row.waiting else None,
                )
                for place, row in enumerate(waiting, 1)
            ),
            queued=queued or 0,
            capacity=_capacity(nodes, held),
            fault_injection=self._settings.allow_fault_injection,
        )


def _capacity(nodes: Sequence[NodeView], specs: Sequence[dict[str, Any]]) -> ClusterCapacityView:
    usable = [
        node
        for node in nodes
        if node.there and node.state is NodeStanding.READY and (node.cpus or node.gpus)
    ]
    cpus, gpus = sum(node.cpus for node in usable), sum(node.gpus for node in usable)
    held = [demand for demand in map(NodeDemand.from_stored_spec, specs) if demand is not None]
    held_cpus = sum(demand.nodes * demand.cpus for demand in held)
    held_gpus = sum(demand.nodes * demand.gpus for demand in held)
    return ClusterCapacityView(
        nodes=len(usable),
        cpus=cpus,
        gpus=gpus,
        # A node that has become a standby since the attempt began is known by its job's spec only.
        free_nodes=min(
            sum(not node.jobs and not node.standby_of for node in usable),
            max(0, len(usable) - sum(demand.nodes for demand in held)),
        ),
        free_cpus=max(0.0, cpus - held_cpus),
        free_gpus=max(0.0, gpus - held_gpus),
    )


async def _standing(
    session: AsyncSession, job: JobRecord, account: Goodput, now: float, program_folder: str
) -> verdict.JobStanding:
    newest = await _NEWEST_INCIDENT.first(session, job=job.id)
    saved = await _NEWEST_CHECKPOINT.first(session, job=job.id)
    state = State(job.state)
    ended = await _INCIDENTS.all(session, job=job.id) if state.terminal else []
    waiting = job.waiting if not state.terminal else None
    kind = program_levels.brings(job.spec)
    level = program_levels.level_of(kind, job.attempt, job.program) or ProgramLevel.SCRIPT
    attempt = await queries.newest_attempt(session, job.id) if kind.is_program else None
    return verdict.JobStanding(
        state=state,
        desired=Desired(job.desired),
        now=now,
        created_at=job.created_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        step=job.step,
        steps=job.steps or None,
        attempt=job.attempt,
        waiting=WaitingView(**waiting) if waiting else None,
        level=level,
        reads_steps=program_levels.reads_steps(job.spec, level),
        has_step=job.cursor_attempt == job.attempt or _has_first_step(job, attempt),
        incidents=job.incidents,
        last=newest
        and replace(
            read_incident(newest.number, newest.data),
            opened_at=newest.opened_at,
            closed_at=newest.closed_at,
        ),
        slow_ranks=tuple(sorted(int(rank) for rank in job.slow)) if state.on_cluster else (),
        # Of an earlier attempt, before a pause or a fault, they are over.
        data_wait=job.data_wait if job.cursor_attempt == job.attempt else 0.0,
        fetch_wait=job.fetch_wait,
        reads_shards=bool((job.spec.get("data") or {}).get("sources")),
        faults=tuple(_faults(ended, account)),
        saved_step=saved.step if saved else None,
        saved_uri=saved.uri if saved else None,
        program_folder=program_folder,
        outcome_code=job.outcome_code,
        outcome_message=job.outcome_message or "",
        eta_s=job_row_stats.eta_s(job),
        goodput=account.goodput if has_goodput(job.spec, job.cursor_attempt) else None,
        held_device_s=account.held_device_s,
        lost_device_s=sum(account.lost_device_s.values()),
        reported_at=job.told_at,
    )


def _faults(incidents: Sequence[IncidentRow], account: Goodput) -> Iterator[verdict.FaultCost]:
    """What the faults cost that stopped the job and did not end it; a resize is none."""
    for row in incidents:
        record = read_incident(row.number, row.data)
        stopped = Fact.NEXT_RUNS in facts_of(record)
        if stopped and record.cause not in (Cause.RESIZE, Cause.REMOTE_UNAVAILABLE):
            took_s = number(record.phases_s.get("total")) or 0.0
            lost_s = account.lost_device_s.get(row.number, 0.0)
            yield verdict.FaultCost(record.steps_lost, took_s, lost_s)


def _has_first_step(job: JobRecord, newest: AttemptRow | None) -> bool:
    """Whether the present attempt is known to have made a step, though no row of it is stored."""
    is_present = newest is not None and newest.number == job.attempt
    return is_present and newest is not None and newest.first_step is not None


async def _timeline(
    session: AsyncSession,
    job: JobRecord,
    account: Goodput,
    now: float,
    since: float | None = None,
    until: float | None = None,
) -> TimelineView:
    intervals = await accounts.state_intervals(session, job, now)
    idle: list[tuple[float, float, State | None]] = [
        (interval.since, interval.until, interval.state)
        for interval in intervals
        if not interval.held
    ]
    idle += [(absence.since, absence.until, None) for absence in account.absences]
    if job.ended_at is None and intervals and intervals[-1].held:
        known = intervals[-1].until
        if now - known <= accounts.REPORT_S:
            now = known
        idle.append((known, now, None))
    formed = await accounts.formed_worlds(session, job.id)
    periods = world_periods(formed, accounts.times_held(intervals))
    attempts = [(at, number_) for at, number_ in await _ATTEMPTS.all(session, job=job.id)]
    start = job.created_at if since is None else since
    end = (job.ended_at or now) if until is None else until
    return TimelineView(
        since=start,
        until=max(start, end),
        spans=tuple(timeline.timeline_spans(account.spans, idle, attempts, start, end)),
        worlds=tuple(timeline.world_views(periods, ranks_per_node(job.spec), start, end)),
        incidents=tuple(
            incident
            for incident in await _timeline_incidents(session, job.id, mesh_changes(formed))
            if incident.at <= end and (incident.closed_at or end) >= start
        ),
        checkpoints=tuple(
            checkpoint
            for checkpoint in await _timeline_checkpoints(session, job.id)
            if start <= checkpoint.at <= end
        ),
    )


async def _timeline_incidents(
    session: AsyncSession, job_id: str, changes: Mapping[int, tuple[FormedWorld, FormedWorld]]
) -> list[TimelineIncidentView]:
    rows = await queries.INCIDENTS.all(session, job=job_id)
    return [
        _timeline_incident(row, read_incident(row.number, row.data), changes.get(row.number))
        for row in rows
    ]


def _timeline_incident(
    row: IncidentRow, incident: IncidentRecord, change: tuple[FormedWorld, FormedWorld] | None
) -> TimelineIncidentView:
    return TimelineIncidentView(
        number=row.number,
        at=number(incident.signalled_at) or row.opened_at,
        closed_at=row.closed_at,
        cause=incident.cause,
        decision=incident.decision or None,
        mesh_change=queries.mesh_change_view(change),
    )


async def _timeline_checkpoints(session: AsyncSession, job_id: str) -> list[TimelineCheckpointView]:
    found = await _CHECKPOINTS.all(session, job=job_id)
    return [TimelineCheckpointView(step=step, at=at, tier=tier) for step, at, tier in found]


async def _render(render: Callable[[RecordedRanks, T], D], recorded: RecordedRanks, ranks: T) -> D:
    """Render the view; a large history in a thread, so that it does not block other requests."""
    if recorded.measured * recorded.buckets <= _MAX_INLINE_VALUES:
        return render(recorded, ranks)
    return await asyncio.to_thread(render, recorded, ranks)


async def _recorded_ranks(
    session: AsyncSession, job: JobRecord, query: RankHistoryQuery
) -> tuple[RecordedRanks, dict[int, str]]:
    recorded = await rank_reading.read_recorded(session, job, query)
    nodes = await rank_reading.nodes_between(session, job.id, recorded.since, recorded.until)
    return recorded, nodes
