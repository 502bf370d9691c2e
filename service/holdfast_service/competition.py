"""Who else wants the cluster: read in the transaction that decides whether a job may start."""

from __future__ import annotations

from sqlalchemy import ColumnElement, and_, select

from holdfast_service.admission import Demand
from holdfast_service.lifecycle import State
from holdfast_service.store.models import Intent, Job
from holdfast_service.store.transaction import Effect, JobTransaction


async def demands_of_others(tx: JobTransaction) -> tuple[list[Demand], list[Demand]]:
    """What other jobs hold on the cluster, and what older ones in the queue wait for."""
    rows = await tx.session.execute(
        select(Job.id, Job.state, Job.spec, Job.waiting)
        .where(Job.cleaned.is_(False), Job.id != tx.job.id, ~_released())
        .order_by(Job.id)
    )
    held: list[Demand | None] = []
    before: list[Demand | None] = []
    for row in rows:
        state = State(row.state)
        if state is State.QUEUED:
            # Only one that was looked at and waits for nodes keeps a place: a job that cannot be
            # driven at all must not hold up the queue.
            if row.id < tx.job.id and row.waiting and row.waiting["resource"] == "nodes":
                before.append(Demand.stored(row.spec))
        elif state is not State.PAUSED:
            held.append(Demand.stored(row.spec))
    return _readable(held), _readable(before)


def _readable(demands: list[Demand | None]) -> list[Demand]:
    return [one for one in demands if one is not None]


def _released() -> ColumnElement[bool]:
    """It has ended, and nothing of it is on the cluster: only its clean-up elsewhere goes on."""
    done = select(Intent.job_id).where(
        Intent.job_id == Job.id, Intent.name == Effect.RELEASE, Intent.done_at.is_not(None)
    )
    return and_(Job.state.in_([state for state in State if state.terminal]), done.exists())
