"""What is stored of a job's ranks, read for those who look: where they are now, how fast each was
over time and on which node, who had one of them and where it stood in incidents."""

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

from holdfast_service.job_model.lifecycle import State
from holdfast_service.placement.replica_placement import coordinates
from holdfast_service.policy.quarantine import node_name
from holdfast_service.readers import rank_heatmap
from holdfast_service.store import rank_series
from holdfast_service.store.models import (
    Attempt,
    AttemptMember,
    Incident,
    Job,
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
_ATTEMPTS_LOOKED_AT = 20

_NUMBER: BindParameter[int] = bindparam("number", type_=Integer)
_ATTEMPT = Statement(select(Attempt).where(Attempt.job_id == JOB, Attempt.number == _NUMBER))
_MEMBERS = Statement(
    select(AttemptMember)
    .where(AttemptMember.job_id == JOB, AttemptMember.attempt == _NUMBER)
    .order_by(AttemptMember.rank)
)
_SEATS = Statement(
    select(AttemptMember.rank, AttemptMember.node_id, AttemptMember.host).where(
        AttemptMember.job_id == JOB, AttemptMember.attempt == _NUMBER
    )
)


def _attempts_between(*columns: Any) -> AnySelect:
    """Of the attempts that were there in a time; the newest first."""
    until: BindParameter[float] = bindparam("until", type_=Float)
    return (
        select(*columns)
        .where(
            Attempt.job_id == JOB,
            Attempt.forming_at <= until,
            func.coalesce(Attempt.ended_at, until) >= bindparam("since"),
        )
        .order_by(Attempt.number.desc())
        .limit(_ATTEMPTS_LOOKED_AT)
    )


_PLACE = (AttemptMember.rank, AttemptMember.worker, AttemptMember.node_id, AttemptMember.host)
_PLACES_BETWEEN = Statement(
    select(*_PLACE)
    .where(
        AttemptMember.job_id == JOB,
        AttemptMember.attempt.in_(_attempts_between(Attempt.number)),
    )
    .group_by(*_PLACE)  # most ranks keep their worker through all attempts
    .order_by(func.max(AttemptMember.attempt))
)
_SIZES_BETWEEN = Statement(_attempts_between(Attempt.number, Attempt.world_size))


@dataclass(frozen=True)
class Asked:
    """A history of ranks that is wanted. None: from the beginning, up to the end."""

    since: float | None = None
    until: float | None = None
    buckets: int = 120
    of: RankMeasure = RankMeasure.COMPUTE_S


@dataclass(frozen=True)
class Recorded:
    """What is stored of the time that was asked for; `since` and `until` are settled."""

    of: RankMeasure
    since: float
    until: float
    buckets: int
    stretch: rank_series.Stretch | None

    @property
    def bucket_s(self) -> float:
        return (self.until - self.since) / self.buckets

    @property
    def measured(self) -> int:
        """Ranks that told what they took."""
        return self.stretch.compute.shape[1] if self.stretch is not None else 0

    def shown(self, known: Mapping[int, Any]) -> list[int]:
        """Ranks that are shown, of those whose place is known; ascending."""
        ranks = [rank for rank in known if rank < self.measured] if self.measured else list(known)
        return ranks or list(range(self.measured))

    def values(self, ranks: Sequence[int]) -> rank_series.Values | None:
        """A row for each rank, a value for each bucket; None: nothing is known of any."""
        if self.stretch is None or not ranks:
            return None
        starts = self.stretch.since + self.stretch.width_s * np.arange(
            len(self.stretch.steps), dtype=np.float64
        )
        told = rank_heatmap.measured(self.of, self.stretch, self.measured)
        found = rank_heatmap.bucketed(told, starts, self.since, self.bucket_s, self.buckets)
        kept: rank_series.Values = found[ranks]
        return kept


async def ranks_view(session: AsyncSession, job: Job) -> RanksView:
    """The ranks of the job's newest attempt, as they were last seen."""
    newest = await _ATTEMPT.first(session, job=job.id, number=job.attempt)
    states = await rank_series.STATES.first(session, job=job.id)
    live = State(job.state).on_cluster
    seen: Mapping[str, Sequence[Any]] = {}
    if states is not None and states.attempt == job.attempt:
        seen = states.seen
    members = await _MEMBERS.all(session, job=job.id, number=job.attempt)
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


async def recorded(session: AsyncSession, job: Job, asked: Asked) -> Recorded:
    """Of all the time that there is, if nothing else is asked for."""
    extent = await rank_series.extent(session, job.id)
    last = job.ended_at or time.time()
    since = asked.since
    if since is None:
        since = max(job.created_at, extent[0] if extent else 0)
    until = asked.until
    if until is None:
        until = min(last, extent[1] if extent else last)
    until = max(until, since + 1e-3 * asked.buckets)
    stretch = await rank_series.read(session, job.id, since, until)
    return Recorded(asked.of, since, until, asked.buckets, stretch)


Members = Mapping[int, tuple[str, tuple[str, ...]]]
"""Rank -> its node, and the workers that had it, oldest first."""


async def members_between(
    session: AsyncSession, job_id: str, since: float, until: float
) -> Members:
    """Of the attempts that were there in this time; of many, the newest."""
    rows = await _PLACES_BETWEEN.all(session, job=job_id, since=since, until=until)
    nodes: dict[int, str] = {}
    workers: dict[int, dict[str, None]] = defaultdict(dict)
    for rank, worker, node_id, host in rows:
        nodes[rank] = node_name(node_id, host) if node_id else ""
        workers[rank][worker] = None
    return {rank: (node, tuple(workers[rank])) for rank, node in sorted(nodes.items())}


async def places_between(
    session: AsyncSession, job_id: str, since: float, until: float
) -> dict[int, str]:
    """Rank -> its node, the last that it was on in this time, of the attempts that were there; of
    many, the newest."""
    attempts = await _SIZES_BETWEEN.all(session, job=job_id, since=since, until=until)
    found: dict[int, str] = {}
    for number, world_size in attempts:
        if world_size <= len(found):
            continue  # a newer attempt told of them all
        for rank, node_id, host in await _SEATS.all(session, job=job_id, number=number):
            found.setdefault(rank, node_name(node_id, host) if node_id else "")
    return dict(sorted(found.items()))


def history(told: Recorded, members: Members) -> RankHistoryView:
    ranks = told.shown(members)
    found = told.values(ranks)
    values: rank_heatmap.Rows = tuple((None,) * told.buckets for _ in ranks)
    return RankHistoryView.model_construct(  # its hundred thousand values need no second look
        of=told.of,
        since=told.since,
        until=told.until,
        bucket_s=told.bucket_s,
        ranks=tuple(
            HistoryRankView(rank=rank, node=node, workers=workers)
            for rank in ranks
            for node, workers in (members.get(rank, ("", ())),)
        ),
        values=values if found is None else rank_heatmap.plain(found),
    )


def heat(told: Recorded, places: Mapping[int, str]) -> RankHeatView:
    """The same for a picture."""
    ranks = told.shown(places)
    found = told.values(ranks)
    if found is None:
        found = np.full((len(ranks), told.buckets), np.nan, np.float32)
    nodes = {name: number for number, name in enumerate(dict.fromkeys(places.values()))}
    return RankHeatView(
        of=told.of,
        since=told.since,
        until=told.until,
        bucket_s=told.bucket_s,
        buckets=told.buckets,
        ranks=tuple(ranks),
        nodes=tuple(nodes) or ("",),
        node_of=tuple(nodes.get(places.get(rank, ""), 0) for rank in ranks),
        values=b64encode(found.astype("<f2").tobytes()).decode(),
    )


async def workers(session: AsyncSession, job_id: str, rank: int) -> list[RankWorkerView]:
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


async def stacks(
    session: AsyncSession, job_id: str, rank: int
) -> tuple[list[RankStackView], list[int]]:
    """Newest first: where the rank stood, and the incidents that it had a part in."""
    found: list[RankStackView] = []
    numbers: list[int] = []
    for incident in await session.scalars(
        select(Incident).where(Incident.job_id == job_id).order_by(Incident.number.desc())
    ):
        said = incident.data
        if any(rank in (one.get("ranks") or [one.get("rank")]) for one in said.get("lost") or ()):
            numbers.append(incident.number)
        found += [
            RankStackView(
                incident=incident.number,
                at=incident.opened_at,
                frames=tuple(map(str, one.get("frames") or ())),
            )
            for one in said.get("stacks") or ()
            if rank in (one.get("ranks") or ())
        ]
    return found, numbers
