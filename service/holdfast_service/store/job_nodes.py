"""The nodes that jobs are on now, and what health probes have found of them."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.job_model.lifecycle import ON_CLUSTER
from holdfast_service.policy.quarantine import node_name
from holdfast_service.store.models import Attempt, AttemptMember, Job, Node
from holdfast_service.store.statement import Statement
from holdfast_service.views.jobs import NodeFindingView, UnwellNodeView

_UNWELL = Statement(select(Node.id, Node.findings).where(func.json_array_length(Node.findings) > 0))

Seats = dict[str, dict[str, set[int]]]
"""Job → name of a node → the ranks that the job has there; a standby's node has none."""


async def unwell(
    session: AsyncSession, jobs: Collection[Job]
) -> dict[str, tuple[UnwellNodeView, ...]]:
    """Job → its nodes of which something was found. Jobs that have none are left out."""
    on_cluster = [job.id for job in jobs if job.state in ON_CLUSTER]
    if not on_cluster:
        return {}
    found = {
        node_id: tuple(NodeFindingView(**one) for one in findings)
        for node_id, findings in await _UNWELL.all(session)
    }
    if not found:
        return {}  # as nearly always: thousands of ranks need not be looked through
    seats = await _seats(session, on_cluster)
    views = {
        job: tuple(
            UnwellNodeView(node=name, ranks=tuple(sorted(ranks)), findings=found[name])
            for name, ranks in sorted(of_job.items())
            if name in found
        )
        for job, of_job in seats.items()
    }
    return {job: told for job, told in views.items() if told}


async def _seats(session: AsyncSession, jobs: Collection[str]) -> Seats:
    seats: Seats = {}
    if not jobs:
        return seats
    members = await session.execute(
        select(AttemptMember.job_id, AttemptMember.node_id, AttemptMember.host, AttemptMember.rank)
        .join(Job, Job.id == AttemptMember.job_id)
        .where(Job.id.in_(jobs), AttemptMember.attempt == Job.attempt)
    )
    for job, node_id, host, rank in members:
        seats.setdefault(job, {}).setdefault(node_name(node_id, host), set()).add(rank)
    attempts = await session.execute(
        select(Attempt.job_id, Attempt.standbys)
        .join(Job, Job.id == Attempt.job_id)
        .where(Job.id.in_(jobs), Attempt.number == Job.attempt)
    )
    for job, standbys in attempts:
        for one in standbys:
            name = node_name(str(one.get("node_id") or ""), str(one.get("host") or ""))
            seats.setdefault(job, {}).setdefault(name, set())
    return seats
