"""Reads the node demand of other jobs, in the transaction that decides whether a job may start."""

from __future__ import annotations

from sqlalchemy import ColumnElement, and_, select

from holdfast_service.job_model.admission import Claim, NodeDemand
from holdfast_service.job_model.lifecycle import State
from holdfast_service.store.models import Intent, JobRecord
from holdfast_service.store.transaction import Effect, JobTransaction

_QUERY_CHUNK = 500


class CompetingDemand:
    """Caches the demand of jobs that hold or await nodes: a spec never changes."""

    def __init__(self, reserve_after_s: float) -> None:
        """Nodes are reserved for a job that has waited for them for this long."""
        self._reserve_after_s = reserve_after_s
        self._known: dict[str, NodeDemand | None] = {}

    async def of_other_jobs(self, tx: JobTransaction) -> tuple[list[Claim], list[Claim]]:
        """The claims of other jobs on the cluster, and of older jobs in the queue."""
        rows = await tx.session.execute(
            select(JobRecord.id, JobRecord.name, JobRecord.state, JobRecord.waiting)
            .where(JobRecord.cleaned.is_(False), JobRecord.id != tx.job.id, ~_released())
            .order_by(JobRecord.id)
        )
        held: list[Claim] = []
        before: list[Claim] = []
        jobs = [row for row in rows if row.state != State.PAUSED]
        await self._read(tx, {row.id for row in jobs})
        for row in jobs:
            demand = self._known.get(row.id)
            if demand is None:
                continue  # its spec cannot be read
            if row.state != State.QUEUED:
                held.append(Claim(row.id, demand, row.name))
            # Only a queued job that was tried and waits for nodes keeps its place: a job that
            # cannot be driven at all must not block the queue.
            elif row.id < tx.job.id and row.waiting and row.waiting["resource"] == "nodes":
                overdue = tx.now - row.waiting["since"] > self._reserve_after_s
                before.append(Claim(row.id, demand, row.name, overdue))
        return held, before

    async def _read(self, tx: JobTransaction, wanted: set[str]) -> None:
        known = {job: demand for job, demand in self._known.items() if job in wanted}
        missing = sorted(wanted - known.keys())
        for start in range(0, len(missing), _QUERY_CHUNK):
            chunk = missing[start : start + _QUERY_CHUNK]
            for job, spec in await tx.session.execute(
                select(JobRecord.id, JobRecord.spec).where(JobRecord.id.in_(chunk))
            ):
                known[job] = NodeDemand.from_stored_spec(spec)
        self._known = known


def _released() -> ColumnElement[bool]:
    """The job has ended and holds nothing on the cluster; clean-up elsewhere may go on."""
    done = select(Intent.job_id).where(
        Intent.job_id == JobRecord.id, Intent.name == Effect.RELEASE, Intent.done_at.is_not(None)
    )
    return and_(JobRecord.state.in_([state for state in State if state.terminal]), done.exists())
