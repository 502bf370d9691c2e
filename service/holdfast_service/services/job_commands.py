"""Commands of users to a submitted job: cancel, pause, resume, resize, labels.

A command writes the desired state to the job's row, with its event, and a reconciler carries it
out; repeating a command changes nothing. A change that needs no cluster happens at once. All
commands raise JobNotFound for an id that belongs to no job, and JobEnded where it is too late.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from holdfast_service.errors import InvalidParameters, JobEnded
from holdfast_service.job_model.events.kinds import JobEvent
from holdfast_service.job_model.events.progress import (
    CancelRequestedEvent,
    PauseRequestedEvent,
    ResizeRequestedEvent,
    ResumeRequestedEvent,
)
from holdfast_service.job_model.labels import MAX_LABELS, LabelName, LabelText
from holdfast_service.job_model.lifecycle import Desired, State
from holdfast_service.store import queries
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import canonical, not_found
from holdfast_service.store.models import JobRecord
from holdfast_service.store.transaction import (
    Effect,
    JobTransaction,
    NoSuchJob,
    job_transaction,
)
from holdfast_service.views.jobs import JobView


async def cancel(store: Store, job_id: str, now: bool) -> JobView:
    """End the job after its last state is saved; with `now`, without waiting for that."""
    async with command_transaction(store, job_id) as tx:
        if tx.state.terminal and tx.state is not State.CANCELLED:
            raise JobEnded(f"job {job_id} has already ended ({tx.state.lower()})")
        if tx.state.terminal:
            return await queries.job_view(tx.session, tx.job)
        if _set_desired(tx, Desired.CANCELLED, CancelRequestedEvent()) and tx.state in (
            State.QUEUED,
            State.PAUSED,
        ):
            # Nothing of the job is on the cluster, so that it can end at once.
            tx.end(State.CANCELLED, "cancelled", f"cancelled while it was {tx.state.lower()}")
        elif now:
            await tx.record_intent(Effect.CANCEL_NOW)
        return await queries.job_view(tx.session, tx.job)


async def pause(store: Store, job_id: str) -> JobView:
    """Save the job's state and release its resources until it is resumed."""
    async with command_transaction(store, job_id) as tx:
        _refuse_ended(tx)
        if _set_desired(tx, Desired.PAUSED, PauseRequestedEvent()) and tx.state is State.QUEUED:
            tx.transition(State.PAUSED, reason="paused while it was queued")
        return await queries.job_view(tx.session, tx.job)


async def resume(store: Store, job_id: str) -> JobView:
    """Continue a paused job from its newest checkpoint; a job that is still pausing, after that."""
    async with command_transaction(store, job_id) as tx:
        _refuse_ended(tx)
        if _set_desired(tx, Desired.RUNNING, ResumeRequestedEvent()) and tx.state is State.PAUSED:
            tx.transition(State.QUEUED, reason="the user resumed it")
        return await queries.job_view(tx.session, tx.job)


async def resize(store: Store, job_id: str, nodes: int | None) -> JobView:
    """Train an elastic job on at most so many nodes; None: on as many as its spec allows.

    A queued or paused job starts with that size. Raises InvalidParameters for a job without a range
    of nodes, and for a number outside of it.
    """
    async with command_transaction(store, job_id) as tx:
        _refuse_ended(tx)
        _check_size(tx.job, nodes)
        if nodes != tx.job.wanted_nodes:
            tx.job.wanted_nodes = nodes
            tx.job.due_at = 0.0
            tx.emit(ResizeRequestedEvent(nodes=nodes))
        return await queries.job_view(tx.session, tx.job)


async def set_labels(
    store: Store, job_id: str, changes: Mapping[LabelName, LabelText | None]
) -> JobView:
    """Change labels of a job in any state; None removes one. Raises InvalidParameters."""
    async with command_transaction(store, job_id) as tx:
        merged = {**tx.job.spec.get("labels", {}), **changes}
        labels = {name: value for name, value in merged.items() if value is not None}
        if len(labels) > MAX_LABELS:
            why = f"a job has at most {MAX_LABELS} labels, not {len(labels)}"
            raise InvalidParameters(why, faults=[{"path": "labels", "message": why}])
        tx.job.spec = {**tx.job.spec, "labels": labels}
        tx.job.owner = labels.get("owner")
        return await queries.job_view(tx.session, tx.job)


def _check_size(job: JobRecord, nodes: int | None) -> None:
    allowed = job.spec["resources"].get("nodes")
    if allowed is None:
        why = "the job has one size: only a spec with resources.nodes {min, max} can be resized"
    elif nodes is not None and not allowed["min"] <= nodes <= allowed["max"]:
        why = f"the job trains on {allowed['min']} to {allowed['max']} nodes, not on {nodes}"
    else:
        return
    raise InvalidParameters(why, faults=[{"path": "nodes", "message": why}])


def _set_desired(tx: JobTransaction, desired: Desired, event: JobEvent) -> bool:
    """False if that state is desired already."""
    if tx.job.desired == desired:
        return False
    tx.job.desired = desired
    tx.job.due_at = 0.0  # its reconciler acts at once
    tx.emit(event)
    return True


def _refuse_ended(tx: JobTransaction) -> None:
    if tx.state.terminal:
        raise JobEnded(
            f"job {tx.job.id} has already ended ({tx.state.lower()}): submit it again to continue"
        )
    if tx.job.desired == Desired.CANCELLED:
        raise JobEnded(f"job {tx.job.id} is being cancelled")


@asynccontextmanager
async def command_transaction(store: Store, job_id: str) -> AsyncIterator[JobTransaction]:
    """Lock the job that a user names, for changes. Raises JobNotFound."""
    try:
        async with job_transaction(store, canonical(job_id)) as tx:
            yield tx
    except NoSuchJob as error:
        raise not_found(job_id) from error
