"""Statistics over all jobs, for monitoring.

They are computed from the store, so every server reports the same values and a restart loses
nothing. Each incident is read once, after it closes or, if its job has been removed by then, from
what stays of the job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import and_, case, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import ColumnElement

from holdfast_service.job_model.events.codec import read_incident
from holdfast_service.job_model.lifecycle import DATA_WAIT, ON_CLUSTER, TERMINAL, State
from holdfast_service.policy.quarantine import NodeStanding, standing_at
from holdfast_service.store.engine import Store
from holdfast_service.store.job_row_stats import HIGH_DATA_WAIT
from holdfast_service.store.latency_histogram import Distribution
from holdfast_service.store.models import (
    AttemptRow,
    IncidentRow,
    JobRecord,
    NodeRow,
    Outbox,
    RemovedJob,
)
from holdfast_service.store.nodes import GONE_AFTER_S, quarantine_of

LOOKBACK_S = 600.0
"""An incident is counted even if it is stored this much later than it closed."""


@dataclass(frozen=True)
class QueueWait:
    """The queued jobs that wait for one resource."""

    jobs: int
    longest_s: float


@dataclass
class FleetStatistics:
    jobs: Mapping[str, int] = field(default_factory=dict)
    """Number of jobs, by state."""
    incidents: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of closed incidents, by (cause, decision)."""
    phases: Mapping[str, Distribution] = field(default_factory=dict)
    """Durations of the recoveries' phases, by phase."""
    lost_steps: int = 0
    effective_s: float = 0.0
    """Productive seconds of all jobs."""
    held_s: float = 0.0
    """Seconds on the cluster of all jobs, past and present."""
    waits: Mapping[str, QueueWait] = field(default_factory=dict)
    """Waits by resource."""
    open_incidents: Mapping[str, int] = field(default_factory=dict)
    """Number of open incidents of jobs that have not ended, by cause."""
    ranks: int = 0
    """Number of ranks in running attempts."""
    nodes: Mapping[NodeStanding, int] = field(default_factory=dict)
    """Number of present nodes, by standing."""
    unreleased_jobs: int = 0
    """Number of ended jobs that are not released from the cluster."""
    unsent_webhooks: int = 0
    data_bound_jobs: int = 0
    """Number of running jobs whose steps wait for data for long, or that stand for want of it."""

    @property
    def goodput(self) -> float | None:
        return min(1.0, self.effective_s / self.held_s) if self.held_s > 0 else None


class FleetReader:
    """Reads the statistics from the store. Safe for concurrent requests."""

    def __init__(self, store: Store) -> None:
        self.store = store
        """The store, which counts what this process has stored since it started."""
        self._incidents: Counter[tuple[str, str]] = Counter()
        self._phases: dict[str, Distribution] = {}
        self._lost_steps = 0
        self._counted: dict[tuple[str, int], float] = {}
        self._until = 0.0

    async def statistics(self, now: float) -> FleetStatistics:
        async with self.store.read(long=True) as session:
            states = await session.execute(
                select(JobRecord.state, func.count()).group_by(JobRecord.state)
            )
            held = (
                func.sum(JobRecord.held_s),
                func.sum(_known_until(now) - JobRecord.held_since),
                func.sum(JobRecord.productive_s),
            )
            left_s, present_s, effective_s = (await session.execute(select(*held))).one()
            of_removed = func.sum(RemovedJob.held_s), func.sum(RemovedJob.productive_s)
            removed_held_s, removed_effective_s = (await session.execute(select(*of_removed))).one()
            await self._count_incidents(session)
            return FleetStatistics(
                jobs={row[0]: row[1] for row in states},
                incidents=Counter(self._incidents),
                phases=dict(self._phases),
                lost_steps=self._lost_steps,
                effective_s=(effective_s or 0.0) + (removed_effective_s or 0.0),
                held_s=(left_s or 0.0) + max(0.0, present_s or 0.0) + (removed_held_s or 0.0),
                waits=await _waits(session, now),
                open_incidents=await _open_incidents(session),
                ranks=await session.scalar(_RANKS) or 0,
                nodes=await _nodes(session, now),
                unreleased_jobs=await session.scalar(_UNRELEASED) or 0,
                unsent_webhooks=await session.scalar(_UNSENT) or 0,
                data_bound_jobs=await session.scalar(_DATA_BOUND) or 0,
            )

    async def _count_incidents(self, session: AsyncSession) -> None:
        since = self._until - LOOKBACK_S
        for closed in await _closed_incidents(session, since):
            key = closed.job_id, closed.number
            if key in self._counted:
                continue
            self._counted[key] = closed.at
            self._until = max(self._until, closed.at)
            incident = read_incident(closed.number, closed.data)
            self._incidents[incident.cause, incident.decision or ""] += 1
            self._lost_steps += incident.steps_lost or 0
            for phase, taken_s in incident.phases_s.items():
                self._phases.setdefault(phase, Distribution()).add(taken_s)
        old = self._until - LOOKBACK_S
        self._counted = {key: at for key, at in self._counted.items() if at > old}


def _known_until(now: float) -> ColumnElement[float]:
    """See `accounts.known_until`."""
    told, since = JobRecord.told_at, JobRecord.held_since
    known = case((told > since, told), else_=since)
    return case((known < now, known), else_=now)


class _ClosedIncident(NamedTuple):
    job_id: str
    number: int
    at: float
    data: Mapping[str, Any]


async def _closed_incidents(session: AsyncSession, since: float) -> list[_ClosedIncident]:
    """The incidents that closed after `since`, of present and of removed jobs, in the order of
    closing."""
    row = IncidentRow
    rows = await session.execute(
        select(row.job_id, row.number, row.closed_at, row.data).where(row.closed_at > since)
    )
    found = [
        _ClosedIncident(job_id, number, closed_at, data)
        for job_id, number, closed_at, data in rows
        if closed_at is not None
    ]
    removed = await session.execute(
        select(RemovedJob.id, RemovedJob.incidents).where(RemovedJob.removed_at > since)
    )
    for job_id, incidents in removed:
        for kept in incidents:
            if kept["closed_at"] > since:
                found.append(_ClosedIncident(job_id, kept["number"], kept["closed_at"], kept))
    return sorted(found, key=lambda closed: closed.at)


def counted_of(incident: IncidentRow) -> dict[str, Any]:
    """The fields of a closed incident that the statistics need; they stay when its job is
    removed."""
    counted = {name: incident.data[name] for name in _COUNTED if name in incident.data}
    return {"number": incident.number, "closed_at": incident.closed_at, **counted}


_COUNTED = ("cause", "decision", "steps_lost", "phases_s")
_RANKS = (
    select(func.sum(AttemptRow.world_size))
    .join(
        JobRecord,
        and_(AttemptRow.job_id == JobRecord.id, AttemptRow.number == JobRecord.attempt),
    )
    .where(JobRecord.state.in_(ON_CLUSTER), AttemptRow.state == "running")
)
_UNRELEASED = select(func.count()).where(
    JobRecord.cleaned.is_(False), JobRecord.state.in_(TERMINAL)
)
_UNSENT = select(func.count()).select_from(Outbox)
_DATA_BOUND = select(func.count()).where(
    JobRecord.state == State.RUNNING,
    or_(
        and_(
            JobRecord.data_wait >= HIGH_DATA_WAIT,
            JobRecord.cursor_attempt == JobRecord.attempt,
        ),
        JobRecord.waiting["resource"].as_string() == DATA_WAIT,
    ),
)


async def _waits(session: AsyncSession, now: float) -> dict[str, QueueWait]:
    resource = JobRecord.waiting["resource"].as_string()
    since = func.min(JobRecord.queued_at)
    queued = (JobRecord.state == State.QUEUED, JobRecord.waiting.is_not(None))
    found = await session.execute(
        select(resource, func.count(), since).where(*queued).group_by(resource)
    )
    return {name: QueueWait(jobs, max(0.0, now - first)) for name, jobs, first in found}


async def _open_incidents(session: AsyncSession) -> dict[str, int]:
    cause = IncidentRow.data["cause"].as_string()
    found = await session.execute(
        select(cause, func.count())
        .join(JobRecord, IncidentRow.job_id == JobRecord.id)
        .where(JobRecord.state.not_in(TERMINAL), IncidentRow.closed_at.is_(None))
        .group_by(cause)
    )
    return {row[0] or "unknown": row[1] for row in found}


async def _nodes(session: AsyncSession, now: float) -> Counter[NodeStanding]:
    present = await session.scalars(select(NodeRow).where(NodeRow.last_seen > now - GONE_AFTER_S))
    return Counter(standing_at(quarantine_of(node), now) for node in present)
