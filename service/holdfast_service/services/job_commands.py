"""Commands of users to a submitted job: cancel, pause, resume, restart, resize, labels, priority.

A command writes the desired state to the job's row, with its event, and a reconciler carries it
out; repeating a command changes nothing. A change that needs no cluster happens at once. All
commands raise JobNotFound for an id that belongs to no job, JobEnded where it is too late, and
JobChanged before they change a job whose generation is not `expected`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from holdfast_service.errors import InvalidParameters, JobChanged, JobEnded
from holdfast_service.job_model.events.kinds import JobEvent
from holdfast_service.job_model.events.progress import (
    CancelRequestedEvent,
    PauseRequestedEvent,
    ResizeRequestedEvent,
    RestartRequestedEvent,
    ResumeRequestedEvent,
)
from holdfast_service.job_model.labels import MAX_LABELS, LabelName, LabelText
from holdfast_service.job_model.lifecycle import Desired, State
from holdfast_service.store import queries
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import canonical, not_found
from holdfast_service.store.models import Intent, JobRecord
from holdfast_service.store.transaction import (
    Effect,
    JobTransaction,
    NoSuchJob,
    job_transaction,
)
from holdfast_service.views.jobs import JobView

Generations = frozenset[int] | None
"""The generations in which a command may change the job; None for any."""


class JobCommands:
    def __init__(self, store: Store, notify: Callable[[str], None]) -> None:
        """`notify(job_id)` reports new work for a job to the reconciler of this process; those of
        other processes find it by polling the store."""
        self._store = store
        self._notify = notify

    async def cancel(self, job_id: str, now: bool = False, expected: Generations = None) -> JobView:
        """End the job after its last state is saved; with `now`, without waiting for that."""
        async with self._command(job_id) as tx:
            if tx.state.terminal and tx.state is not State.CANCELLED:
                raise JobEnded(f"job {job_id} has already ended ({tx.state.lower()})")
            if tx.state.terminal:
                return await queries.job_view(tx.session, tx.job)
            changed = _set_desired(tx, Desired.CANCELLED, CancelRequestedEvent(), expected)
            if changed and tx.state in (State.QUEUED, State.PAUSED):
                # Nothing of the job is on the cluster, so that it can end at once.
                tx.end(State.CANCELLED, "cancelled", f"cancelled while it was {tx.state.lower()}")
            elif now and await tx.session.get(Intent, (tx.job.id, Effect.CANCEL_NOW)) is None:
                if not changed:
                    _count_change(tx, expected)
                await tx.record_intent(Effect.CANCEL_NOW)
            return await queries.job_view(tx.session, tx.job)

    async def pause(self, job_id: str, expected: Generations = None) -> JobView:
        """Save the job's state and release its resources until it is resumed."""
        async with self._command(job_id) as tx:
            _refuse_ended(tx)
            if (
                _set_desired(tx, Desired.PAUSED, PauseRequestedEvent(), expected)
                and tx.state is State.QUEUED
            ):
                tx.transition(State.PAUSED, reason="paused while it was queued")
            return await queries.job_view(tx.session, tx.job)

    async def resume(self, job_id: str, expected: Generations = None) -> JobView:
        """Continue a paused job from its newest checkpoint; a pausing job, after it has paused."""
        async with self._command(job_id) as tx:
            _refuse_ended(tx)
            if (
                _set_desired(tx, Desired.RUNNING, ResumeRequestedEvent(), expected)
                and tx.state is State.PAUSED
            ):
                tx.transition(State.QUEUED, reason="the user resumed it")
            return await queries.job_view(tx.session, tx.job)

    async def restart(self, job_id: str, expected: Generations = None) -> JobView:
        """Save the job's state, release its resources, and queue it again: its new processes run
        the installed build of Holdfast. A job that has no processes stays as it is."""
        async with self._command(job_id) as tx:
            _refuse_ended(tx)
            if tx.state.on_cluster and tx.state is not State.PAUSING:
                _count_change(tx, expected)
                tx.emit(RestartRequestedEvent())
                await tx.record_intent(Effect.PAUSE)
                tx.transition(State.PAUSING, reason="restarted by the user")
            return await queries.job_view(tx.session, tx.job)

    async def resize(self, job_id: str, nodes: int | None, expected: Generations = None) -> JobView:
        """Train an elastic job on at most so many nodes; None: on as many as its spec allows.

        A queued or paused job starts with that size. Raises InvalidParameters for a job without a
        range of nodes, and for a number outside of it.
        """
        async with self._command(job_id) as tx:
            _refuse_ended(tx)
            _check_size(tx.job, nodes)
            if nodes != tx.job.wanted_nodes:
                _count_change(tx, expected)
                tx.job.wanted_nodes = nodes
                tx.emit(ResizeRequestedEvent(nodes=nodes))
            return await queries.job_view(tx.session, tx.job)

    async def change(
        self,
        job_id: str,
        labels: Mapping[LabelName, LabelText | None],
        priority: int | None = None,
        expected: Generations = None,
    ) -> JobView:
        """Change labels of a job in any state (None removes one), and its priority (None: as it
        is). Raises InvalidParameters."""
        async with self._command(job_id) as tx:
            spec = tx.job.spec
            merged = {**spec.get("labels", {}), **labels}
            left = {name: value for name, value in merged.items() if value is not None}
            if len(left) > MAX_LABELS:
                why = f"a job has at most {MAX_LABELS} labels, not {len(left)}"
                raise InvalidParameters(why, faults=[{"path": "labels", "message": why}])
            new = {**spec, "labels": left}
            if priority is not None:
                new["priority"] = priority
            if new != spec:
                _count_change(tx, expected)
                tx.job.spec, tx.job.owner = new, left.get("owner")
                tx.job.priority = new.get("priority", tx.job.priority)
            return await queries.job_view(tx.session, tx.job)

    @asynccontextmanager
    async def _command(self, job_id: str) -> AsyncIterator[JobTransaction]:
        async with command_transaction(self._store, job_id) as tx:
            stored_id = tx.job.id
            yield tx
        self._notify(stored_id)


def _check_size(job: JobRecord, nodes: int | None) -> None:
    allowed = job.spec["resources"].get("nodes")
    if allowed is None:
        why = "the job has one size: only a spec with resources.nodes {min, max} can be resized"
    elif nodes is not None and not allowed["min"] <= nodes <= allowed["max"]:
        why = f"the job trains on {allowed['min']} to {allowed['max']} nodes, not on {nodes}"
    else:
        return
    raise InvalidParameters(why, faults=[{"path": "nodes", "message": why}])


def _set_desired(
    tx: JobTransaction, desired: Desired, event: JobEvent, expected: Generations
) -> bool:
    """False if that state is desired already."""
    if tx.job.desired == desired:
        return False
    _count_change(tx, expected)
    tx.job.desired = desired
    tx.emit(event)
    return True


def _count_change(tx: JobTransaction, expected: Generations) -> None:
    refuse_if_changed(tx.job, expected)
    tx.job.generation += 1
    tx.job.due_at = 0.0  # its reconciler acts at once


def _refuse_ended(tx: JobTransaction) -> None:
    if tx.state.terminal:
        raise JobEnded(
            f"job {tx.job.id} has already ended ({tx.state.lower()}): submit it again to continue"
        )
    if tx.job.desired == Desired.CANCELLED:
        raise JobEnded(f"job {tx.job.id} is being cancelled")


def refuse_if_changed(job: JobRecord, expected: Generations) -> None:
    """Raises JobChanged."""
    if expected is not None and job.generation not in expected:
        raise JobChanged(
            f"job {job.id} was changed meanwhile, and its ETag is now "
            f'"{job.generation}": read it again, and decide anew',
            generation=job.generation,
        )


@asynccontextmanager
async def command_transaction(store: Store, job_id: str) -> AsyncIterator[JobTransaction]:
    """Lock the job that a user names, for changes. Raises JobNotFound."""
    try:
        async with job_transaction(store, canonical(job_id)) as tx:
            yield tx
    except NoSuchJob as error:
        raise not_found(job_id) from error
