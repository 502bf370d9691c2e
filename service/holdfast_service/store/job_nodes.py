"""The nodes that jobs run on at present, and the health findings about these nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.lifecycle import ON_CLUSTER
from holdfast_service.policy.quarantine import node_name
from holdfast_service.store.models import AttemptMember, AttemptRow, JobRecord, NodeRow
from holdfast_service.store.statement import Statement
from holdfast_service.views.nodes import NodeFindingView, UnwellNodeView
from holdfast_workers.protocol.findings import ROOM

_UNWELL = Statement(
    select(NodeRow.id, NodeRow.findings).where(func.json_array_length(NodeRow.findings) > 0)
)

RanksByNode = dict[str, dict[str, set[int]]]
"""Job id → node name → ranks of the job on that node; empty for the node of a standby."""


@dataclass(frozen=True)
class NodeJobs:
    """The jobs that have a node at present: with ranks on it, or as their standby."""

    ranks: tuple[str, ...] = ()
    standby: tuple[str, ...] = ()


async def jobs_by_node(session: AsyncSession) -> dict[str, NodeJobs]:
    """The nodes that jobs have, by name; the jobs of a node in the order of their ids."""
    ranks: dict[str, set[str]] = {}
    standby: dict[str, set[str]] = {}
    rows = await session.execute(
        select(AttemptMember.job_id, AttemptMember.node_id, AttemptMember.host)
        .join(JobRecord, JobRecord.id == AttemptMember.job_id)
        .where(JobRecord.state.in_(list(ON_CLUSTER)), AttemptMember.attempt == JobRecord.attempt)
        .distinct()
    )
    for job, node_id, host in rows:
        ranks.setdefault(node_name(node_id, host), set()).add(job)
    async for job, name in _standbys(session, JobRecord.state.in_(list(ON_CLUSTER))):
        standby.setdefault(name, set()).add(job)
    return {
        name: NodeJobs(tuple(sorted(ranks.get(name, ()))), tuple(sorted(standby.get(name, ()))))
        for name in ranks.keys() | standby.keys()
    }


async def unwell_nodes(
    session: AsyncSession, jobs: Collection[JobRecord]
) -> dict[str, tuple[UnwellNodeView, ...]]:
    """Job id → the job's nodes with health findings. Jobs without such nodes are left out."""
    on_cluster = [job.id for job in jobs if job.state in ON_CLUSTER]
    if not on_cluster:
        return {}
    found = dict(await _UNWELL.all(session))
    if not found:
        return {}  # the common case: avoids reading thousands of ranks
    seats = await _ranks_by_node(session, on_cluster)
    views = {
        job: tuple(
            UnwellNodeView(node=name, ranks=tuple(sorted(ranks)), findings=shown)
            for name, ranks in sorted(of_job.items())
            if (shown := _findings_for(job, found.get(name, [])))
        )
        for job, of_job in seats.items()
    }
    return {job: nodes for job, nodes in views.items() if nodes}


def _findings_for(job: str, findings: list[dict[str, Any]]) -> tuple[NodeFindingView, ...]:
    """The findings that concern the job, not those of other jobs for which the node is too
    small."""
    return tuple(
        NodeFindingView(**finding)
        for finding in findings
        if finding.get("probe") != ROOM or finding.get("job", job) == job
    )


async def _ranks_by_node(session: AsyncSession, jobs: Collection[str]) -> RanksByNode:
    seats: RanksByNode = {}
    if not jobs:
        return seats
    members = await session.execute(
        select(AttemptMember.job_id, AttemptMember.node_id, AttemptMember.host, AttemptMember.rank)
        .join(JobRecord, JobRecord.id == AttemptMember.job_id)
        .where(JobRecord.id.in_(jobs), AttemptMember.attempt == JobRecord.attempt)
    )
    for job, node_id, host, rank in members:
        seats.setdefault(job, {}).setdefault(node_name(node_id, host), set()).add(rank)
    async for job, name in _standbys(session, JobRecord.id.in_(jobs)):
        seats.setdefault(job, {}).setdefault(name, set())
    return seats


async def _standbys(
    session: AsyncSession, jobs: ColumnElement[bool]
) -> AsyncIterator[tuple[str, str]]:
    """(job, node) of each standby in the present attempt of these jobs."""
    attempts = await session.execute(
        select(AttemptRow.job_id, AttemptRow.standbys)
        .join(JobRecord, JobRecord.id == AttemptRow.job_id)
        .where(jobs, AttemptRow.number == JobRecord.attempt)
    )
    for job, standbys in attempts:
        for standby in standbys:
            node_id, host = str(standby.get("node_id") or ""), str(standby.get("host") or "")
            yield job, node_name(node_id, host)
