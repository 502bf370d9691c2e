"""Drives one job under its lease: one turn at a time, each turn safe to be the last.

A turn reads the job, and does the next thing that brings it from what it is to what the user
wants. What it will do to the cluster it writes down first, and every effect can be repeated, so
the next holder of the lease goes on wherever a crash left off. No transaction is open while the
cluster is asked.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from sqlalchemy import select, text

from holdfast_service.admission import Demand, reason_to_wait
from holdfast_service.crossing import Crossing, Point
from holdfast_service.job_spec import JobSpec
from holdfast_service.lifecycle import Desired, State
from holdfast_service.reports import (
    Cluster,
    ClusterUnavailable,
    JobLaunch,
    Phase,
    SupervisorReport,
    SupervisorUnavailable,
)
from holdfast_service.settings import Settings
from holdfast_service.store import projection
from holdfast_service.store.engine import Store
from holdfast_service.store.leases import Lease
from holdfast_service.store.models import Intent, Job
from holdfast_service.store.transaction import JobTransaction, job_transaction

START, CANCEL, RELEASE = "start", "cancel", "release"
_ADMISSION_LOCK = 0x41646D69  # "Admi": one decision on capacity at a time


@dataclass(frozen=True)
class Rest:
    """How long the job needs nobody. `keep`: its driver stays on it meanwhile."""

    seconds: float
    keep: bool = True


class Driver:
    """One job's drive, for as long as this process holds its lease."""

    def __init__(
        self, store: Store, cluster: Cluster, settings: Settings, crossing: Crossing, lease: Lease
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._settings = settings
        self._crossing = crossing
        self._lease = lease
        self._silent_since: float | None = None  # monotonic: the supervisor did not answer
        self._ended_since: float | None = None  # monotonic: it says ENDED, rows still come
        self._seen: tuple[Job, dict[str, Intent]] | None = None  # as the last turn left the job

    async def turn(self) -> Rest | None:
        """Do what is next; None: the job needs nobody ever again.

        Raises LeaseLost when another holds the job; any other error leaves it as it was.
        """
        job, intents = self._seen or await self._read()
        self._seen = None
        try:
            return await self._next(job, intents)
        except ClusterUnavailable as error:
            return await self._without_cluster(error)
        except SupervisorUnavailable as error:
            return await self._without_supervisor(job, intents, error)

    def look_anew(self) -> None:
        """The job was changed by somebody else: the next turn reads it from the store."""
        self._seen = None

    async def _next(self, job: Job, intents: dict[str, Intent]) -> Rest | None:
        state = State(job.state)
        if state.terminal:
            return await self._clean(job, intents)
        if state is State.QUEUED:
            return await self._admit(job)
        if not state.on_cluster:
            return Rest(self._settings.queue_retry_s, keep=False)
        if job.desired == Desired.CANCELLED:
            rest = await self._cancel(job, intents)
            if rest is not None:
                return rest
        elif intents[START].done_at is None:
            await self._start(job)
        return await self._observe(job, intents)

    # ---- starting

    async def _admit(self, job: Job) -> Rest:
        """QUEUED: start it if it fits, or say what it waits for."""
        capacity = await self._cluster.capacity()
        async with self._transaction() as tx:
            if tx.state is not State.QUEUED:
                return Rest(0.0)  # cancelled since it was read
            if self._store.postgres:
                # Two jobs must not both be told that the last free nodes are theirs. (On SQLite
                # there is one writer at a time anyway.)
                await tx.session.execute(
                    text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADMISSION_LOCK}
                )
            held, before = await _others(tx)
            wanted = Demand.of(JobSpec.model_validate(job.spec))
            reason = reason_to_wait(capacity, held, before, wanted)
            if reason is not None:
                tx.wait_for("nodes", reason)
                return Rest(self._settings.queue_retry_s, keep=False)
            await tx.intend(START)
            tx.transition(State.STARTING)
        await self._crossing(Point.START_INTENDED)
        return Rest(0.0)

    async def _start(self, job: Job) -> None:
        """STARTING: have a supervisor, whether this process or one before it asked for it."""
        # The lease may have been lost since the job was read; the effect must not come from one
        # who no longer holds it.
        async with self._transaction():
            pass
        folder = self._settings.job_dir(job.id)
        await asyncio.to_thread(folder.mkdir, mode=0o700, parents=True, exist_ok=True)
        created = await self._cluster.ensure_supervisor(
            JobLaunch(
                job_id=job.id,
                name=job.name,
                spec=job.spec,
                data_dir=str(folder),
                last_event=job.cursor_event,
                last_attempt=job.attempt,
            )
        )
        await self._crossing(Point.START_DONE)
        async with self._transaction() as tx:
            intent = await tx.done(START)
            tx.emit("supervisor.started", {"created": created, "times": intent.times})

    # ---- running

    async def _observe(self, job: Job, intents: dict[str, Intent]) -> Rest:
        """Fetch and store what the supervisor has to say."""
        report = await self._cluster.poll(job.id, projection.cursors_of(job))
        self._silent_since = None
        await self._crossing(Point.POLLED)
        pause = Rest(self._settings.reconcile_interval_s)
        if not projection.brings_news(job, report):
            return pause
        anew = intents[START].times > 1
        async with self._transaction() as tx:
            absorbed = await projection.absorb(tx, report, hold_end=not self._drained())
            if absorbed.rows and anew:
                (await tx.intend(START)).times = 1  # it advances again: losses count anew
            if report.phase is Phase.ENDED and not tx.state.terminal and self._drained():
                tx.end(State.FAILED, "outcome_lost", "it ended, and its outcome was not told")
        await self._crossing(Point.ENDED if tx.state.terminal else Point.STORED)
        if report.phase is Phase.ENDED and (self._ended_since is None or absorbed.rows):
            self._ended_since = time.monotonic()
        if absorbed.end_held or _full(report):
            return Rest(0.0)
        if CANCEL in intents or tx.state.terminal:
            return pause
        if tx.job.desired == Desired.CANCELLED:
            return Rest(0.0)  # its user has cancelled it meanwhile
        if intents[START].done_at is not None and not anew:
            self._seen = tx.job, intents  # what the transaction has just read is as good
        return pause

    def _drained(self) -> bool:
        """Whether what comes after the last row of an ended job was waited for long enough."""
        since = self._ended_since
        return since is not None and time.monotonic() - since > self._settings.drain_deadline_s

    # ---- ending

    async def _cancel(self, job: Job, intents: dict[str, Intent]) -> Rest | None:
        """Tell the supervisor; None: it knows, and is to be observed until it has ended."""
        intent = intents.get(CANCEL)
        if State(job.state) is not State.CANCELLING:
            async with self._transaction() as tx:
                await tx.intend(CANCEL)
                tx.transition(State.CANCELLING, reason="the user cancelled it")
            await self._crossing(Point.CANCEL_INTENDED)
            return Rest(0.0)
        if intent is not None and time.time() - intent.at > self._settings.cancel_deadline_s:
            return await self._cancel_by_force(job)
        if intent is None or intent.done_at is None:
            await self._cluster.cancel(job.id, "the user cancelled it")
            await self._crossing(Point.CANCEL_DONE)
            async with self._transaction() as tx:
                await tx.done(CANCEL)
        return None

    async def _cancel_by_force(self, job: Job) -> Rest:
        """Nobody ended it in time: take its resources away, then say that it is over."""
        if not await self._cluster.release(job.id):
            return Rest(self._settings.release_retry_s)
        async with self._transaction() as tx:
            if not tx.state.terminal:
                tx.end(
                    State.CANCELLED,
                    "cancelled",
                    "cancelled; its supervisor did not answer in time, so its resources were "
                    "taken away",
                )
        await self._crossing(Point.ENDED)
        return Rest(0.0)

    async def _clean(self, job: Job, intents: dict[str, Intent]) -> Rest | None:
        """Terminal: leave nothing of it on the cluster."""
        if job.cleaned:
            return None
        if START in intents:
            if RELEASE not in intents:
                async with self._transaction() as tx:
                    await tx.intend(RELEASE)
                await self._crossing(Point.RELEASE_INTENDED)
            if not await self._cluster.release(job.id):
                return await self._clean_later(intents.get(RELEASE))
            await self._crossing(Point.RELEASE_DONE)
        async with self._transaction() as tx:
            tx.job.cleaned = True
            if START in intents:
                await tx.done(RELEASE)
                tx.emit("job.released", {})
        return None

    async def _clean_later(self, intent: Intent | None) -> Rest:
        if intent is None or time.time() - intent.at <= self._settings.release_deadline_s:
            return Rest(self._settings.release_retry_s)
        async with self._transaction() as tx:
            tx.wait_for(
                "release",
                f"something of it is still on the cluster after "
                f"{self._settings.release_deadline_s:g} s; it is being tried again",
                event="release.overdue",
            )
        return Rest(self._settings.error_retry_max_s, keep=False)

    # ---- when somebody does not answer

    async def _without_cluster(self, error: ClusterUnavailable) -> Rest:
        async with self._transaction() as tx:
            tx.wait_for("cluster", f"the cluster cannot be reached: {error}")
        return Rest(self._settings.cluster_retry_s)

    async def _without_supervisor(
        self, job: Job, intents: dict[str, Intent], error: SupervisorUnavailable
    ) -> Rest:
        """It restarts by itself; one that stays silent is asked for anew, and adopted if there."""
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
        waited = now - self._silent_since > self._settings.supervisor_deadline_s
        if State(job.state) is State.CANCELLING and (waited or intents[START].done_at is None):
            return await self._cancel_by_force(job)
        if not waited:
            async with self._transaction() as tx:
                tx.wait_for("supervisor", f"its supervisor does not answer: {error}")
            return Rest(self._settings.reconcile_interval_s)
        if intents[START].times >= self._settings.supervisor_starts:
            return await self._give_up(job)
        async with self._transaction() as tx:
            (await tx.intend(START)).done_at = None
        await self._crossing(Point.START_INTENDED)
        self._silent_since = None
        return Rest(0.0)

    async def _give_up(self, job: Job) -> Rest:
        """Too many supervisors were made for it: an endless loop ends here, with a cause."""
        if not await self._cluster.release(job.id):
            return Rest(self._settings.release_retry_s)
        async with self._transaction() as tx:
            if not tx.state.terminal:
                tx.end(
                    State.FAILED,
                    "supervisor_lost",
                    f"its supervisor was lost {self._settings.supervisor_starts} times",
                )
        await self._crossing(Point.ENDED)
        return Rest(0.0)

    # ---- the store

    def _transaction(self) -> AbstractAsyncContextManager[JobTransaction]:
        return job_transaction(self._store, self._lease.job_id, token=self._lease.token)

    async def _read(self) -> tuple[Job, dict[str, Intent]]:
        async with self._store.read() as session:
            job = await session.get_one(Job, self._lease.job_id)
            intents = await session.scalars(select(Intent).where(Intent.job_id == job.id))
            return job, {intent.name: intent for intent in intents}


async def _others(tx: JobTransaction) -> tuple[list[Demand], list[Demand]]:
    """What other jobs hold on the cluster, and what older ones in the queue wait for."""
    rows = await tx.session.execute(
        select(Job.id, Job.state, Job.spec, Job.waiting)
        .where(Job.cleaned.is_(False), Job.id != tx.job.id)
        .order_by(Job.id)
    )
    held: list[Demand] = []
    before: list[Demand] = []
    for row in rows:
        state = State(row.state)
        if state is State.QUEUED:
            # Only one that was looked at and waits for nodes keeps a place: a job that cannot be
            # driven at all must not hold up the queue.
            if row.id < tx.job.id and row.waiting and row.waiting["resource"] == "nodes":
                before += _demand(row.spec)
        elif state is not State.PAUSED:
            held += _demand(row.spec)
    return held, before


def _demand(spec: dict[str, Any]) -> list[Demand]:
    """What a job needs; nothing where its spec cannot be read, which is that job's trouble."""
    try:
        return [Demand.of(JobSpec.model_validate(spec))]
    except ValidationError:
        return []


def _full(report: SupervisorReport) -> bool:
    """Whether a report looks cut off by its bound: there is more to fetch at once."""
    return len(report.rows) >= 100 or len(report.logs) >= 100 or len(report.events) >= 100
