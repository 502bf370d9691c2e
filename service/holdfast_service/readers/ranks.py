"""Reads the stored data of a job's ranks: current state, compute times over time, nodes, worker
processes, and the stacks recorded in incidents."""

from __future__ import annotations

import time
from base64 import b64encode
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import BindParameter, Float, Integer, bindparam, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.events.codec import read_incident
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.program_levels import brings
from holdfast_service.placement.replica_placement import coordinates
from holdfast_service.policy.quarantine import node_name
from holdfast_service.readers import rank_heatmap
from holdfast_service.store import rank_series
from holdfast_service.store.models import (
    AttemptMember,
    AttemptRow,
    IncidentRow,
    JobRecord,
)
from holdfast_service.store.statement import JOB, AnySelect, Statement
from holdfast_service.views.ranks import (
    HistoryRankView,
    RankHeatView,
    RankHistoryView,
    RankMeasure,
    RankStackView,
    RanksView,
    RankView,
    RankWorkerView,
)

WORKERS_SHOWN = 200
_MAX_ATTEMPTS = 20

_NUMBER: BindParameter[int] = bindparam("number", type_=Integer)
_ATTEMPT = Statement(
    select(AttemptRow).where(AttemptRow.job_id == JOB, AttemptRow.number == _NUMBER)
)
_MEMBERS = Statement(
    select(AttemptMember)
    .where(AttemptMember.job_id == JOB, AttemptMember.attempt == _NUMBER)
    .order_by(AttemptMember.rank)
)
_RANK_NODES = Statement(
    select(AttemptMember.rank, AttemptMember.node_id, AttemptMember.host).where(
        AttemptMember.job_id == JOB, AttemptMember.attempt == _NUMBER
    )
)


def _attempts_between(*columns: Any) -> AnySelect:
    """Selects from the attempts that existed between `since` and `until`; the newest first."""
    until: BindParameter[float] = bindparam("until", type_=Float)
    return (
        select(*columns)
        .where(
            AttemptRow.job_id == JOB,
            AttemptRow.forming_at <= until,
            func.coalesce(AttemptRow.ended_at, until) >= bindparam("since"),
        )
        .order_by(AttemptRow.number.desc())
        .limit(_MAX_ATTEMPTS)
    )


_MEMBER_COLUMNS = (
    AttemptMember.rank,
    AttemptMember.worker,
    AttemptMember.node_id,
    AttemptMember.host,
)
_MEMBERS_BETWEEN = Statement(
    select(*_MEMBER_COLUMNS)
    .where(
        AttemptMember.job_id == JOB,
        AttemptMember.attempt.in_(_attempts_between(AttemptRow.number)),
    )
    .group_by(*_MEMBER_COLUMNS)  # most ranks keep their worker through all attempts
    .order_by(func.max(AttemptMember.attempt))
)
_SIZES_BETWEEN = Statement(_attempts_between(AttemptRow.number, AttemptRow.world_size))


@dataclass(frozen=True)
class RankHistoryQuery:
    """The query for a rank history. `since` None: from the beginning; `until` None: to the end."""

    since: float | None = None
    until: float | None = None
    buckets: int = 120
    of: RankMeasure = RankMeasure.COMPUTE_S


@dataclass(frozen=True)
class RecordedRanks:
    """The stored rank times of a query, with `since` and `until` resolved."""

    of: RankMeasure
    since: float
    until: float
    buckets: int
    times: rank_series.RankTimes | None

    @property
    def bucket_s(self) -> float:
        return (self.until - self.since) / self.buckets

    @property
    def measured(self) -> int:
        """Number of ranks with recorded times."""
        return self.times.compute.shape[1] if self.times is not None else 0

    def shown(self, known: Mapping[int, Any]) -> list[int]:
        """The ranks to show, ascending: those in `known` that have recorded times."""
        ranks = [rank for rank in known if rank < self.measured] if self.measured else list(known)
        return ranks or list(range(self.measured))

    def values(self, ranks: Sequence[int]) -> rank_series.Values | None:
        """One row per rank with one value per bucket; None if no times are recorded."""
        if self.times is None or not ranks:
            return None
        starts = self.times.since + self.times.width_s * np.arange(
            len(self.times.steps), dtype=np.float64
        )
        measured = rank_heatmap.measure(self.of, self.times, self.measured)
        found = rank_heatmap.rebucket(measured, starts, self.since, self.bucket_s, self.buckets)
        kept: rank_series.Values = found[ranks]
        return kept


async def ranks_view(session: AsyncSession, job: JobRecord) -> RanksView:
    """The ranks of the job's newest attempt, in their last reported state."""
    newest = await _ATTEMPT.first(session, job=job.id, number=job.attempt)
    states = await rank_series.STATES.first(session, job=job.id)
    live = State(job.state).on_cluster
    seen: Mapping[str, Sequence[Any]] = {}
    if states is not None and states.attempt == job.attempt:
        seen = states.seen
    members = await _MEMBERS.all(session, job=job.id, number=job.attempt)
    times = [state[3] for state in seen.values() if state[3]]
    median = float(np.median(times)) if times else None
    steps = {rank: state[0] for rank, state in seen.items()}
    if newest is not None and brings(job.spec).is_program:
        # Its ranks need not report steps, and one that reports none stands where it was launched.
        launched_at = newest.restore.get("step") or 0
        steps = {rank: step for rank, step in steps.items() if step > launched_at}
    mesh = newest.mesh if newest is not None else {}
    return RanksView(
        at=states.at if states is not None and seen else None,
        attempt=job.attempt,
        front_step=max(steps.values(), default=None),
        ranks=tuple(
            _rank(member, seen.get(str(member.rank)), steps, median, mesh, live=live)
            for member in members
        ),
    )


def _rank(
    member: AttemptMember,
    seen: Sequence[Any] | None,
    steps: Mapping[str, int],
    median: float | None,
    mesh: Mapping[str, int],
    *,
    live: bool,
) -> RankView:
    """`steps`: rank -> its step, if known."""
    _, phase, silent_s, took = seen or (None, None, None, None)
    step = steps.get(str(member.rank))
    return RankView.from_attributes(
        member,
        node=_node_of(member),
        step=step,
        phase=phase if live else None,
        lag_steps=None if step is None else max(steps.values()) - step,
        step_time_s=took,
        slow_factor=round(took / median, 3) if took and median else None,
        silent_s=silent_s if live else None,
        coordinates=dict(zip(mesh, coordinates(member.rank, mesh), strict=True)),
    )


def _node_of(member: AttemptMember) -> str:
    return node_name(member.node_id, member.host) if member.node_id else ""


async def read_recorded(
    session: AsyncSession, job: JobRecord, query: RankHistoryQuery
) -> RecordedRanks:
    """The stored rank times of the query; the default range is all recorded time."""
    extent = await rank_series.extent(session, job.id)
    last = job.ended_at or time.time()
    since = query.since
    if since is None:
        since = max(job.created_at, extent[0] if extent else 0)
    until = query.until
    if until is None:
        until = min(last, extent[1] if extent else last)
    until = max(until, since + 1e-3 * query.buckets)
    times = await rank_series.read(session, job.id, since, until)
    return RecordedRanks(query.of, since, until, query.buckets, times)


Members = Mapping[int, tuple[str, tuple[str, ...]]]
"""Rank -> its node, and the workers that ran it, oldest first."""


async def nodes_and_workers_between(
    session: AsyncSession, job_id: str, since: float, until: float
) -> Members:
    """The members of the attempts in this time range; of many attempts, the newest."""
    rows = await _MEMBERS_BETWEEN.all(session, job=job_id, since=since, until=until)
    nodes: dict[int, str] = {}
    workers: dict[int, dict[str, None]] = defaultdict(dict)
    for rank, worker, node_id, host in rows:
        nodes[rank] = node_name(node_id, host) if node_id else ""
        workers[rank][worker] = None
    return {rank: (node, tuple(workers[rank])) for rank, node in sorted(nodes.items())}


async def nodes_between(
    session: AsyncSession, job_id: str, since: float, until: float
) -> dict[int, str]:
    """Rank -> the last node that it was on in this time range; of many attempts, the newest."""
    attempts = await _SIZES_BETWEEN.all(session, job=job_id, since=since, until=until)
    found: dict[int, str] = {}
    for number, world_size in attempts:
        if world_size <= len(found):
            continue  # newer attempts already cover all its ranks
        for rank, node_id, host in await _RANK_NODES.all(session, job=job_id, number=number):
            found.setdefault(rank, node_name(node_id, host) if node_id else "")
    return dict(sorted(found.items()))


def history_view(recorded: RecordedRanks, members: Members) -> RankHistoryView:
    ranks = recorded.shown(members)
    found = recorded.values(ranks)
    values: rank_heatmap.Rows = tuple((None,) * recorded.buckets for _ in ranks)
    return RankHistoryView.model_construct(  # skips validation of its many values
        of=recorded.of,
        since=recorded.since,
        until=recorded.until,
        bucket_s=recorded.bucket_s,
        ranks=tuple(
            HistoryRankView(rank=rank, node=node, workers=workers)
            for rank in ranks
            for node, workers in (members.get(rank, ("", ())),)
        ),
        values=values if found is None else rank_heatmap.to_json_rows(found),
    )


def heat_view(recorded: RecordedRanks, node_by_rank: Mapping[int, str]) -> RankHeatView:
    """The history of ranks in the packed form for a heatmap."""
    ranks = recorded.shown(node_by_rank)
    found = recorded.values(ranks)
    if found is None:
        found = np.full((len(ranks), recorded.buckets), np.nan, np.float32)
    nodes = {name: number for number, name in enumerate(dict.fromkeys(node_by_rank.values()))}
    return RankHeatView(
        of=recorded.of,
        since=recorded.since,
        until=recorded.until,
        bucket_s=recorded.bucket_s,
        buckets=recorded.buckets,
        ranks=tuple(ranks),
        nodes=tuple(nodes) or ("",),
        node_of=tuple(nodes.get(node_by_rank.get(rank, ""), 0) for rank in ranks),
        values=b64encode(found.astype("<f2").tobytes()).decode(),
    )


async def rank_workers(session: AsyncSession, job_id: str, rank: int) -> list[RankWorkerView]:
    rows = await session.execute(
        select(AttemptMember, AttemptRow.forming_at, AttemptRow.ended_at)
        .join(
            AttemptRow,
            (AttemptRow.job_id == AttemptMember.job_id)
            & (AttemptRow.number == AttemptMember.attempt),
        )
        .where(AttemptMember.job_id == job_id, AttemptMember.rank == rank)
        .order_by(AttemptMember.attempt.desc())
        .limit(WORKERS_SHOWN)
    )
    return [
        RankWorkerView.from_attributes(member, node=_node_of(member), since=since, until=until)
        for member, since, until in rows
    ]


async def rank_stacks(
    session: AsyncSession, job_id: str, rank: int
) -> tuple[list[RankStackView], list[int]]:
    """The stacks of the rank in incidents, and the incidents that involved it; newest first."""
    found: list[RankStackView] = []
    numbers: list[int] = []
    for row in await session.scalars(
        select(IncidentRow).where(IncidentRow.job_id == job_id).order_by(IncidentRow.number.desc())
    ):
        incident = read_incident(row.number, row.data)
        if any(rank in (item.ranks or (item.rank,)) for item in incident.lost):
            numbers.append(row.number)
        found += [
            RankStackView(incident=row.number, at=row.opened_at, frames=stack.frames)
            for stack in incident.stacks
            if rank in stack.ranks
        ]
    return found, numbers
