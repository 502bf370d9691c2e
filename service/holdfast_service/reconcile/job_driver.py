"""Drives one job under its lease: one turn at a time, each turn safe to be the last.

A turn reads the job, and does the next thing that brings it from what it is to what the user
wants. What it will do to the cluster it writes down first, and every effect can be repeated, so
the next holder of the lease goes on wherever a crash left off. No transaction is open while the
cluster is asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from sqlalchemy import select, text

from holdfast_service.crash_points import CrashHook, CrashPoint
from holdfast_service.job_model.admission import NodeDemand, admit
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.lifecycle import Desired, State
from holdfast_service.job_model.supervisor_protocol import (
    Cluster,
    ClusterUnavailable,
    JobLaunch,
    Phase,
    StopKind,
    StopOrder,
    SupervisorReport,
    SupervisorUnavailable,
)
from holdfast_service.policy.quarantine import Avoided
from holdfast_service.reconcile.cluster_demand import CompetingDemand
from holdfast_service.services.code_packages import CodeService
from holdfast_service.services.fault_injection import deliver
from holdfast_service.services.init_sources import (
    InitHold,
    InitSources,
    has_own_checkpoint,
    is_held_for,
)
from holdfast_service.settings import Settings
from holdfast_service.store import nodes, projection
from holdfast_service.store.engine import Store
from holdfast_service.store.leases import JobLease
from holdfast_service.store.models import Intent, JobRecord
from holdfast_service.store.transaction import Effect, JobTransaction, job_transaction

_AVOIDED_FRESH_S = 1.0
_ADMISSION_LOCK = 0x41646D69  # "Admi": one decision on capacity at a time
_STOPPED = {Effect.CANCEL: CrashPoint.CANCEL_DONE, Effect.PAUSE: CrashPoint.PAUSE_DONE}


@dataclass(frozen=True)
class NextTurn:
    """How long the job needs nobody. `keep_lease`: its driver stays on it meanwhile. `urgent`: the job
    does not merely run, or is looked at: somebody waits for what its supervisor says next."""

    delay_s: float
    keep_lease: bool = True
    urgent: bool = False


class JobDriver:
    """One job's drive, for as long as this process holds its lease."""

    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        settings: Settings,
        crash_hook: CrashHook,
        lease: JobLease,
        sources: InitSources,
        avoided: Callable[[], dict[str, Avoided] | None],
        interval_s: Callable[[bool], float],
        competition: CompetingDemand,
    ) -> None:
        """`avoided()`: the nodes that are set aside, as last read; None: not yet.
        `interval_s(urgent)`: between two polls of a supervisor, at present."""
        self._store = store.low_priority()
        self._polling_store = store.low_priority(polling=True)
        self._cluster = cluster
        self._settings = settings
        self._crash_hook = crash_hook
        self._lease = lease
        self._avoided = avoided
        self._interval_s = interval_s
        self._competition = competition
        self._sent_avoided: tuple[int, dict[str, Avoided] | None] = (0, None)  # of that epoch
        self._hold = InitHold(self._store, sources, lease, settings.error_retry_max_s)
        self._silent_since: float | None = None  # monotonic: the supervisor did not answer
        self._ended_since: float | None = None  # monotonic: it says ENDED, rows still come
        self._admitted: tuple[float, dict[str, Avoided]] | None = None  # when, and who was aside
        self._cached: tuple[JobRecord, dict[str, Intent]] | None = (
            None  # as the last turn left the job
        )

    async def advance(self) -> NextTurn | None:
        """Do what is next; None: the job needs nobody ever again.

        Raises LeaseLost when another holds the job; any other error leaves it as it was.
        """
        job, intents = self._cached or await self._read()
        self._cached = None
        try:
            return await self._next(job, intents)
        except ClusterUnavailable as error:
            return await self._without_cluster(error)
        except SupervisorUnavailable as error:
            return await self._without_supervisor(job, intents, error)

    async def close(self) -> None:
        """There will be no further turn."""
        await self._hold.close()

    def invalidate(self) -> None:
        """The job was changed by somebody else: the next turn reads it from the store."""
        self._cached = None

    async def _next(self, job: JobRecord, intents: dict[str, Intent]) -> NextTurn | None:
        state = State(job.state)
        if state.terminal:
            return await self._clean_up(job, intents)
        if state is State.QUEUED:
            return await self._admit(intents)
        if state is State.PAUSED:
            return NextTurn(self._settings.paused_look_s, keep_lease=False)
        next_turn = None
        if job.desired == Desired.CANCELLED:
            next_turn = await self._cancel(job, intents)
        else:
            if intents[Effect.START].done_at is None:
                intents = {**intents, Effect.START: await self._start(job, intents)}
            if state is State.PAUSING or job.desired == Desired.PAUSED:
                next_turn = await self._pause(job, intents)
        next_turn = next_turn or await self._observe(job, intents)
        if job.faults_injected < job.faults_wanted:
            self.invalidate()
            await deliver(self._store, self._cluster, self._lease, job.faults_injected)
        return next_turn

    # ---- starting

    async def _admit(self, intents: dict[str, Intent]) -> NextTurn:
        """QUEUED: start it if it fits, or say what it waits for."""
        capacity = await self._cluster.capacity()
        async with self._transaction() as tx:
            if tx.state is not State.QUEUED:
                return NextTurn(0.0)  # cancelled since it was read
            if self._store.postgres:
                # Two jobs must not both be told that the last free nodes are theirs. (On SQLite
                # there is one writer at a time anyway.)
                await tx.session.execute(
                    text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADMISSION_LOCK}
                )
            # A cluster that can grow makes room for everybody: nobody else need be asked.
            held: list[NodeDemand] = []
            before: list[NodeDemand] = []
            if not capacity.can_grow:
                held, before = await self._competition.of_other_jobs(tx)
            spec = tx.job.spec
            wanted = NodeDemand.from_stored_spec(spec) or NodeDemand.from_spec(
                JobSpec.model_validate(spec)
            )
            avoided_nodes = await nodes.avoided(tx.session, tx.now)
            admission = admit(capacity, avoided_nodes, held, before, wanted)
            if not admission.may_start:
                tx.wait_for("nodes", admission.why)
                return NextTurn(self._settings.queue_retry_s, keep_lease=False)
            intent = await tx.record_intent(Effect.START, intents)
            tx.transition(State.STARTING, reason=admission.why or None)
        self._admitted = time.monotonic(), avoided_nodes
        await self._crash_hook(CrashPoint.START_INTENDED)
        if tx.job.desired == Desired.RUNNING:
            self._cached = tx.job, {**intents, Effect.START: intent}
        return NextTurn(0.0)

    async def _start(self, job: JobRecord, intents: Mapping[str, Intent]) -> Intent:
        """STARTING: have a supervisor, whether this process or one before it asked for it."""
        avoided_nodes = await self._avoided_at_start()
        package = (
            await CodeService(self._store, self._settings).content(job.code) if job.code else None
        )
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
                origin=job.origin,
                skipped=tuple((item[0], item[1]) for item in job.guards.get("ledger", ())),
                avoid=avoided_nodes,
                package=package,
            )
        )
        await self._crash_hook(CrashPoint.START_DONE)
        async with self._transaction() as tx:
            intent = await tx.record_done(Effect.START, intents)
            tx.emit("supervisor.started", {"created": created, "times": intent.times})
        return intent

    async def _avoided_at_start(self) -> dict[str, Avoided]:
        """The nodes set aside, from a transaction of this moment. The lease may have been lost
        since the job was read; the effect must not come from one who no longer holds it."""
        admitted, self._admitted = self._admitted, None
        if admitted is not None and time.monotonic() - admitted[0] < _AVOIDED_FRESH_S:
            return admitted[1]
        async with self._transaction() as tx:
            return await nodes.avoided(tx.session, tx.now)

    # ---- running

    async def _observe(self, job: JobRecord, intents: dict[str, Intent]) -> NextTurn:
        """Fetch and store what the supervisor has to say."""
        report = await self._cluster.poll(job.id, projection.cursors_of(job))
        self._silent_since = None
        await self._send_avoided(job, report)
        await self._crash_hook(CrashPoint.POLLED)
        pause = self._until_poll(job)
        if not projection.has_changes(job, report, time.time()):
            return pause
        restarted = intents[Effect.START].times > 1
        async with self._transaction(self._store if pause.urgent else self._polling_store) as tx:
            absorbed = await projection.store_report(
                tx, report, self._settings.quarantine_rules, hold_end=not self._drained()
            )
            if absorbed.rows and restarted:
                (
                    await tx.record_intent(Effect.START)
                ).times = 1  # it advances again: losses count anew
            if report.phase is Phase.ENDED and not tx.state.terminal and self._drained():
                tx.end(State.FAILED, "outcome_lost", "it ended, and its outcome was not told")
            if is_held_for(tx.job) and await has_own_checkpoint(tx.session, job.id):
                self._hold.release_in_background(tx.job)
        await self._crash_hook(CrashPoint.ENDED if tx.state.terminal else CrashPoint.STORED)
        pause = self._until_poll(tx.job)
        if report.phase is Phase.ENDED and (self._ended_since is None or absorbed.rows):
            self._ended_since = time.monotonic()
        if absorbed.end_held or _is_truncated(report):
            return NextTurn(0.0)
        if Effect.CANCEL in intents or tx.state.terminal:
            return pause
        if tx.job.desired != Desired.RUNNING and tx.state is not State.PAUSING:
            return NextTurn(0.0)  # its user has cancelled or paused it meanwhile
        if tx.state is State.PAUSING:
            return NextTurn(0.0) if report.phase is Phase.ENDED else pause
        if intents[Effect.START].done_at is not None and not restarted:
            self._cached = tx.job, intents  # what the transaction has just read is as good
        return pause

    def _until_poll(self, job: JobRecord) -> NextTurn:
        urgent = (
            job.desired != Desired.RUNNING
            or State(job.state) is not State.RUNNING
            or self._store.active_requests.is_watched(job.id)
        )
        return NextTurn(self._interval_s(urgent), urgent=urgent)

    async def _send_avoided(self, job: JobRecord, report: SupervisorReport) -> None:
        """A supervisor that has begun anew knows only who was set aside when the job began."""
        avoided_nodes = self._avoided()
        now = (report.epoch, avoided_nodes)
        if avoided_nodes is not None and report.phase is not Phase.ENDED and now != self._sent_avoided:
            await self._cluster.avoid(job.id, avoided_nodes)
            self._sent_avoided = now

    def _drained(self) -> bool:
        """Whether what comes after the last row of an ended job was waited for long enough."""
        since = self._ended_since
        return since is not None and time.monotonic() - since > self._settings.drain_deadline_s

    # ---- ending

    async def _cancel(self, job: JobRecord, intents: dict[str, Intent]) -> NextTurn | None:
        """Tell the supervisor; None: it knows, and is to be observed until it has ended."""
        if State(job.state) is not State.CANCELLING:
            async with self._transaction() as tx:
                await tx.record_intent(Effect.CANCEL, intents)
                tx.transition(State.CANCELLING, reason="the user cancelled it")
            await self._crash_hook(CrashPoint.CANCEL_INTENDED)
            return NextTurn(0.0)
        intent = intents[Effect.CANCEL]
        deadline = 0.0 if Effect.CANCEL_NOW in intents else intent.at + _final_save_s(job)
        forced = max(deadline, intent.at) + self._settings.cancel_deadline_s
        if time.time() > forced or Effect.RELEASE in intents:  # it had been paused by then
            return await self._cancel_by_force(job)
        order = StopOrder(StopKind.CANCEL, "the user cancelled it", deadline)
        await self._send_stop(job, intents, Effect.CANCEL, order)
        return None

    async def _pause(self, job: JobRecord, intents: dict[str, Intent]) -> NextTurn | None:
        """As `_cancel`; but it does not end, and is PAUSED once nothing of it is there."""
        if State(job.state) is not State.PAUSING:
            async with self._transaction() as tx:
                if tx.job.desired == Desired.PAUSED:
                    await tx.record_intent(Effect.PAUSE, intents)
                    tx.transition(State.PAUSING, reason="the user paused it")
            await self._crash_hook(CrashPoint.PAUSE_INTENDED)
            return NextTurn(0.0)
        if Effect.RELEASE in intents:
            return await self._finish_pause(job)
        intent = intents[Effect.PAUSE]
        order = StopOrder(StopKind.PAUSE, "the user paused it", intent.at + _final_save_s(job))
        await self._send_stop(job, intents, Effect.PAUSE, order)
        return None

    async def _send_stop(
        self, job: JobRecord, intents: Mapping[str, Intent], effect: Effect, order: StopOrder
    ) -> None:
        """Again in each turn: a supervisor may have been restarted since."""
        await self._cluster.stop(job.id, order)
        if intents[effect].done_at is None:
            await self._crash_hook(_STOPPED[effect])
            async with self._transaction() as tx:
                await tx.record_done(effect, intents)

    async def _finish_pause(self, job: JobRecord) -> NextTurn:
        """PAUSING, and its supervisor has ended: give everything back that it has."""
        if not await self._cluster.release(job.id):
            return NextTurn(self._settings.release_retry_s)
        await self._crash_hook(CrashPoint.PAUSED)
        async with self._transaction() as tx:
            if tx.state is not State.PAUSING:
                return NextTurn(0.0)
            await tx.forget_intents(Effect.START, Effect.PAUSE, Effect.RELEASE)
            tx.job.slow = {}  # the next supervisor will know of none
            tx.emit("job.released", {})
            tx.transition(State.PAUSED, reason="its state is saved")
            if tx.job.desired == Desired.RUNNING:  # resumed before it was paused
                tx.transition(State.QUEUED, reason="the user resumed it")
            elif tx.job.desired == Desired.CANCELLED:
                tx.end(State.CANCELLED, "cancelled", "cancelled while it was paused")
        return NextTurn(0.0)

    async def _cancel_by_force(self, job: JobRecord) -> NextTurn:
        """Nobody ended it in time: take its resources away, then say that it is over."""
        if not await self._cluster.release(job.id):
            return NextTurn(self._settings.release_retry_s)
        async with self._transaction() as tx:
            if not tx.state.terminal:
                tx.end(
                    State.CANCELLED,
                    "cancelled",
                    "cancelled; its supervisor had ended or did not answer in time, so its "
                    "resources were taken away",
                )
        await self._crash_hook(CrashPoint.ENDED)
        return NextTurn(0.0)

    async def _clean_up(self, job: JobRecord, intents: dict[str, Intent]) -> NextTurn | None:
        """Terminal: leave nothing of it on the cluster."""
        if job.cleaned:
            return None
        if Effect.START in intents:
            if Effect.RELEASE not in intents:
                async with self._transaction() as tx:
                    await tx.record_intent(Effect.RELEASE)
                await self._crash_hook(CrashPoint.RELEASE_INTENDED)
            if not await self._cluster.release(job.id):
                return await self._retry_clean_up(intents.get(Effect.RELEASE))
            await self._crash_hook(CrashPoint.RELEASE_DONE)
            async with self._transaction() as tx:
                if (await tx.record_done(Effect.RELEASE)).times == 1:
                    tx.emit("job.released", {})
        if is_held_for(job) and not await self._hold.release(job):
            return NextTurn(self._settings.error_retry_max_s, keep_lease=False)
        async with self._transaction() as tx:
            tx.job.cleaned = True
        return None

    async def _retry_clean_up(self, intent: Intent | None) -> NextTurn:
        if intent is None or time.time() - intent.at <= self._settings.release_deadline_s:
            return NextTurn(self._settings.release_retry_s)
        async with self._transaction() as tx:
            tx.wait_for(
                "release",
                f"something of it is still on the cluster after "
                f"{self._settings.release_deadline_s:g} s; it is being tried again",
                event="release.overdue",
            )
        return NextTurn(self._settings.error_retry_max_s, keep_lease=False)

    # ---- when somebody does not answer

    async def _without_cluster(self, error: ClusterUnavailable) -> NextTurn:
        async with self._transaction() as tx:
            tx.wait_for("cluster", f"the cluster cannot be reached: {error}")
        return NextTurn(self._settings.cluster_retry_s)

    async def _without_supervisor(
        self, job: JobRecord, intents: dict[str, Intent], error: SupervisorUnavailable
    ) -> NextTurn:
        """It restarts by itself; one that stays silent is asked for anew, and adopted if there."""
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
        waited = now - self._silent_since > self._settings.supervisor_deadline_s
        if State(job.state) is State.CANCELLING and (
            waited or intents[Effect.START].done_at is None
        ):
            return await self._cancel_by_force(job)
        if not waited:
            async with self._transaction() as tx:
                tx.wait_for("supervisor", f"its supervisor does not answer: {error}")
            return NextTurn(self._settings.reconcile_interval_s)
        if intents[Effect.START].times >= self._settings.supervisor_starts:
            return await self._fail_supervisor_lost(job)
        async with self._transaction() as tx:
            (await tx.record_intent(Effect.START)).done_at = None
        await self._crash_hook(CrashPoint.START_INTENDED)
        self._silent_since = None
        return NextTurn(0.0)

    async def _fail_supervisor_lost(self, job: JobRecord) -> NextTurn:
        """Too many supervisors were made for it: an endless loop ends here, with a cause."""
        if not await self._cluster.release(job.id):
            return NextTurn(self._settings.release_retry_s)
        async with self._transaction() as tx:
            if not tx.state.terminal:
                tx.end(
                    State.FAILED,
                    "supervisor_lost",
                    f"its supervisor was lost {self._settings.supervisor_starts} times",
                )
        await self._crash_hook(CrashPoint.ENDED)
        return NextTurn(0.0)

    # ---- the store

    def _transaction(
        self, store: Store | None = None
    ) -> AbstractAsyncContextManager[JobTransaction]:
        return job_transaction(store or self._store, self._lease.job_id, token=self._lease.token)

    async def _read(self) -> tuple[JobRecord, dict[str, Intent]]:
        async with self._store.read() as session:
            job = await session.get_one(JobRecord, self._lease.job_id)
            intents = await session.scalars(select(Intent).where(Intent.job_id == job.id))
            return job, {intent.name: intent for intent in intents}


def _final_save_s(job: JobRecord) -> float:
    return JobSpec.model_validate(job.spec).checkpoint.final_save_s


def _is_truncated(report: SupervisorReport) -> bool:
    """Whether a report looks cut off by its bound: there is more to fetch at once."""
    return len(report.rows) >= 100 or len(report.logs) >= 100 or len(report.events) >= 100
