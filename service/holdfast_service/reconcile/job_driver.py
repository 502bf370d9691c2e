"""Drives one job under its lease, one step at a time; the process may crash after any step.

A step (`JobDriver.advance`) reads the job and takes the next action towards the state that its user
desires. The intent of every cluster effect is stored first, and every effect is idempotent, so the
next holder of the lease continues after a crash. No transaction is open during a cluster call.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import select, text

from holdfast_service.crash_points import CrashHook, CrashPoint
from holdfast_service.errors import SpecUnreadable, StorageUnavailable
from holdfast_service.job_model.admission import Claim, NodeDemand, admit
from holdfast_service.job_model.cluster_growth import GrowthPlan
from holdfast_service.job_model.events.progress import (
    JobReleasedEvent,
    PackagesInstalledEvent,
    ReleaseOverdueEvent,
    SupervisorStartedEvent,
)
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.lifecycle import START_WAIT, SUPERVISOR_START, Desired, State
from holdfast_service.job_model.node_needs import needs_of
from holdfast_service.job_model.supervisor_protocol import (
    Cluster,
    ClusterUnavailable,
    JobPlan,
    LaunchRefused,
    LostAttempt,
    Phase,
    SizeOrder,
    StopKind,
    StopOrder,
    SupervisorReport,
    SupervisorUnavailable,
)
from holdfast_service.placement.restore_points import InitialCheckpoint
from holdfast_service.policy.quarantine import Avoided
from holdfast_service.reconcile import restored_job
from holdfast_service.reconcile.cluster_demand import CompetingDemand
from holdfast_service.reconcile.news_watch import NewsWatch
from holdfast_service.reconcile.package_installation import (
    PACKAGES_LOOK_S,
    PackageInstallation,
)
from holdfast_service.reconcile.preparation import Preparation
from holdfast_service.reconcile.restored_job import RestoredJobs, Verdict
from holdfast_service.remote_tier.location import remote_uri
from holdfast_service.services.code_packages import CodeService
from holdfast_service.services.fault_injection import deliver
from holdfast_service.services.init_sources import (
    InitHold,
    InitSources,
    has_own_checkpoint,
    is_held_for,
)
from holdfast_service.settings import Settings
from holdfast_service.store import job_row_stats, nodes, projection, queries
from holdfast_service.store.engine import Store
from holdfast_service.store.event_rows import close_incidents_of_ended_job
from holdfast_service.store.job_lookup import spec_of
from holdfast_service.store.leases import RowLease
from holdfast_service.store.models import Intent, JobRecord
from holdfast_service.store.transaction import Effect, JobTransaction, job_transaction
from holdfast_workers.protocol import codec

SUPERVISOR_STARTS = 20
"""Supervisors created for one job, without a new row in between, before the job fails."""
_AVOIDED_FRESH_S = 1.0
_SILENT_LOOK_S = 2.0
"""Longest wait between two calls to a supervisor that does not answer: it sends no news either."""
_SUPERVISOR_START_S = 60.0
"""A supervisor that has not answered for so long after its job was started is late: Ray starts a
process for it, which imports the service."""
_ADMISSION_LOCK = 0x41646D69  # "Admi": serialises decisions on capacity
_STOPPED = {Effect.CANCEL: CrashPoint.CANCEL_DONE, Effect.PAUSE: CrashPoint.PAUSE_DONE}


@dataclass(frozen=True)
class NextStep:
    """When the job's next step is due: `delay_s` from now.

    `keep_lease`: the driver keeps the lease until then. `urgent`: the job is changing state or is
    being watched, so a user waits for its supervisor's next report.
    """

    delay_s: float
    keep_lease: bool = True
    urgent: bool = False


class JobDriver:
    """Drives one job for as long as this process holds its lease."""

    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        settings: Settings,
        crash_hook: CrashHook,
        lease: RowLease,
        sources: InitSources,
        avoided: Callable[[], dict[str, Avoided] | None],
        interval_s: Callable[[bool], float],
        competing_demand: CompetingDemand,
        size_of: Callable[[JobRecord], SizeOrder],
        news: NewsWatch,
        restored: RestoredJobs,
        growth: Callable[[], GrowthPlan],
    ) -> None:
        """`avoided()`: the nodes without new ranks, as last read (None: not read yet).
        `size_of(job)`: what an elastic job may have beside the others, as last read.
        `growth()`: what the cluster was last asked for.
        `interval_s(urgent)`: the present interval between two polls of a supervisor."""
        self._store = store.low_priority()
        self._polling_store = store.low_priority(polling=True)
        self._cluster = cluster
        self._settings = settings
        self._crash_hook = crash_hook
        self._lease = lease
        self._avoided = avoided
        self._interval_s = interval_s
        self._competing_demand = competing_demand
        self._size_of = size_of
        self._news = news
        self._restored = restored
        self._growth = growth
        self._hold = InitHold(self._store, sources, lease, settings.pace.error_retry_max_s)
        self._silent_since: float | None = None
        """Monotonic time of the first unanswered call to the supervisor."""
        self._ended_since: float | None = None
        """Monotonic time of the first ENDED report; rows may follow it."""
        self._admitted: tuple[float, dict[str, Avoided]] | None = None  # when, avoided nodes
        self._given: tuple[str, ...] = ()  # the nodes of jobs that start before this one
        self._packages: PackageInstallation | None = None
        self._preparation = Preparation(cluster, settings, sources, self._transaction)
        self._cached: tuple[JobRecord, dict[str, Intent]] | None = None
        """The job as the last step left it."""

    async def advance(self) -> NextStep | None:
        """Take the next step; None: the job needs no further step.

        Raises LeaseLost if another process holds the job; any other error leaves the job unchanged.
        """
        job, intents = self._cached or await self._read()
        self._cached = None
        try:
            return await self._next(job, intents)
        except ClusterUnavailable as error:
            return await self._without_cluster(error)
        except SupervisorUnavailable as error:
            return await self._without_supervisor(job, intents, error)
        except LaunchRefused as error:
            return await self._fail_launch(error)

    async def take_last_report(self) -> None:
        """Store all that the job's supervisor and agents have now: there is no later poll. It ends
        after a while, because ranks may print without end."""
        job, intents = await self._read()
        start = intents.get(Effect.START)
        if start is None or not start.done_at or not State(job.state).on_cluster:
            return
        until = time.monotonic() + self._settings.pace.drain_deadline_s
        with contextlib.suppress(ClusterUnavailable, SupervisorUnavailable):
            while self._silent_since is None:
                is_last = time.monotonic() > until
                cursors = replace(projection.cursors_of(job), fresh=True)
                report = await self._cluster.poll(job.id, cursors)
                async with self._transaction() as tx:
                    stored = await projection.store_report(
                        tx, report, self._settings.quarantine_rules, hold_end=not is_last
                    )
                job = tx.job
                if is_last or not (stored.end_held or _is_truncated(report)):
                    return

    async def close(self) -> None:
        """Release what the driver holds; no step may follow."""
        await self._news.close()
        await self._hold.close()
        if self._packages is not None:
            await self._packages.close()

    def invalidate(self) -> None:
        """Read the job from the store in the next step, because another writer changed it."""
        self._cached = None

    async def _next(self, job: JobRecord, intents: dict[str, Intent]) -> NextStep | None:
        state = State(job.state)
        if state.terminal:
            return await self._clean_up(job, intents)
        if Effect.RESTORED in intents:
            return await self._settle_restored(job)
        if state is State.QUEUED:
            return (
                await self._install_packages(job)
                or await self._prepare(job)
                or await self._admit(intents)
            )
        if state is State.PAUSED:
            return NextStep(self._settings.pace.paused_look_s, keep_lease=False)
        next_step = None
        if job.desired == Desired.CANCELLED:
            next_step = await self._cancel(job, intents)
        else:
            if intents[Effect.START].done_at is None:
                intents = {**intents, Effect.START: await self._start(job, intents)}
            if state is State.PAUSING or job.desired == Desired.PAUSED:
                next_step = await self._pause(job, intents)
        next_step = next_step or await self._observe(job, intents)
        if job.faults_injected < job.faults_wanted:
            self.invalidate()
            await deliver(self._store, self._cluster, self._lease, job.faults_injected)
        return next_step

    # ---- after a restore of the database

    async def _settle_restored(self, job: JobRecord) -> NextStep:
        """Ask the cluster about the job before anything else is done with it."""
        state, settings = State(job.state), self._settings
        try:
            seen = await self._restored.look_for(job)
        except StorageUnavailable as error:
            async with self._transaction() as tx:
                tx.wait_for("storage", f"restored, and its remote storage must be read: {error}")
            return NextStep(settings.pace.error_retry_max_s, keep_lease=False)
        now = time.monotonic()
        self._silent_since = self._silent_since or now
        patient = now - self._silent_since < settings.pace.supervisor_deadline_s
        verdict = restored_job.judge(state, Desired(job.desired), seen, patient=patient)
        if verdict is Verdict.PAUSE and not await self._cluster.release(job.id):
            return NextStep(settings.pace.release_retry_s)
        async with self._transaction() as tx:
            if (tx.state, tx.job.desired) != (state, job.desired):
                return NextStep(0.0)  # a user's command
            if verdict is Verdict.WAIT:
                tx.wait_for("supervisor", restored_job.WAITS)
                return NextStep(settings.pace.reconcile_interval_s)
            await tx.forget_intents(Effect.RESTORED)
            if verdict is Verdict.ADOPT:
                await restored_job.adopt(tx)
            elif verdict is Verdict.PAUSE:
                await restored_job.pause(tx)
        self._silent_since = None
        return NextStep(0.0)

    # ---- starting

    async def _install_packages(self, job: JobRecord) -> NextStep | None:
        """Install the packages of a queued job. None once a node has installed them, and so found
        the versions that all its nodes will have."""
        wanted = job.spec.get("runtime_env", {}).get("pip")
        if not wanted or job.packages is not None:
            return None
        installation = self._packages
        if installation is None:
            timeout_s = job.spec["timeouts"]["install_s"]
            async with self._transaction() as tx:
                tx.wait_for("packages", "a node installs its packages before the job takes nodes")
                avoided = await self._avoided_by(tx)
            self._packages = PackageInstallation(self._cluster, wanted, timeout_s, avoided)
            return NextStep(PACKAGES_LOOK_S)
        if not installation.is_done:
            return NextStep(PACKAGES_LOOK_S)
        self._packages = None
        answer = installation.answer()
        async with self._transaction() as tx:
            if tx.state is not State.QUEUED:
                return NextStep(0.0)
            if answer.error:
                tx.end(State.FAILED, "packages_failed", f"on {answer.host}: {answer.error}")
            else:
                tx.job.packages = list(answer.packages)
                tx.emit(
                    PackagesInstalledEvent(
                        host=answer.host, packages=answer.packages, took_s=installation.took_s
                    )
                )
        return NextStep(0.0)

    async def _prepare(self, job: JobRecord) -> NextStep | None:
        delay_s = await self._preparation.advance(job)
        return None if delay_s is None else NextStep(delay_s)

    async def _admit(self, intents: dict[str, Intent]) -> NextStep:
        """QUEUED: start the job if it fits, or record what it waits for."""
        capacity = await self._cluster.capacity()
        async with self._transaction() as tx:
            if tx.state is not State.QUEUED:
                return NextStep(0.0)  # cancelled since the job was read
            if self._store.postgres:
                # Two jobs must not both be admitted to the last free nodes. (SQLite allows only one
                # writer at a time.)
                await tx.session.execute(
                    text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADMISSION_LOCK}
                )
            held: list[Claim] = []
            before: list[Claim] = []
            if not capacity.unlimited:
                held, before = await self._competing_demand.of_other_jobs(tx)
            aside = await nodes.avoided(tx.session, tx.now)
            unsuitable = await self._unsuitable(tx)
            admission = admit(capacity, aside, held, before, self._claim(tx, unsuitable))
            if not admission.may_start:
                growth = self._growth()
                tx.wait_for(
                    "nodes",
                    admission.why + growth.note(tx.job.id),
                    reserved=admission.reservation,
                    asked=growth.requests.get(tx.job.id),
                )
                return NextStep(self._settings.pace.queue_retry_s, keep_lease=False)
            intent = await tx.record_intent(Effect.START, intents)
            tx.job.kept_off = list(admission.reserved_nodes)
            self._given = admission.given_nodes
            tx.transition(State.STARTING, reason=admission.why or None)
        self._admitted = time.monotonic(), {**aside, **unsuitable}
        await self._crash_hook(CrashPoint.START_INTENDED)
        if tx.job.desired == Desired.RUNNING:
            self._cached = tx.job, {**intents, Effect.START: intent}
        return NextStep(0.0)

    def _claim(self, tx: JobTransaction, unusable: Mapping[str, Avoided]) -> Claim:
        job = tx.job
        demand = NodeDemand.from_stored_spec(job.spec)
        if demand is None:
            demand = NodeDemand.from_spec(JobSpec.model_validate(job.spec))
        overdue = self._competing_demand.overdue(job.queued_at, tx.now)
        return Claim(job.id, demand, job.name, overdue, unusable)

    async def _start(self, job: JobRecord, intents: Mapping[str, Intent]) -> Intent:
        """STARTING: create the supervisor, or adopt it if an earlier process created it."""
        self._ended_since = None
        await self._record_absence(job, intents)
        avoided_nodes = await self._avoided_at_start()
        package = (
            await CodeService(self._store, self._settings).content(job.code) if job.code else None
        )
        folder = self._settings.job_dir(job.id)
        spec = self._readable_spec(job)
        named = spec.checkpoint.remote.uri
        if named is None:
            await asyncio.to_thread(folder.mkdir, mode=0o700, parents=True, exist_ok=True)
        created = await self._cluster.ensure_supervisor(
            JobPlan(
                job_id=job.id,
                spec=spec,
                last_event=job.cursor_event,
                last_attempt=job.attempt,
                last_incident=job.incidents,
                lost=await self._lost_attempt(job, intents),
                origin=_initial_checkpoint(job.origin),
                skipped=tuple((window[0], window[1]) for window in job.guards.get("ledger", ())),
                avoid=avoided_nodes,
                nodes=job.wanted_nodes,
                reserved=tuple(job.kept_off or ()),
                given=self._given,
                package=package,
                remote_root=remote_uri(named, folder),
                packages=tuple(job.packages or ()),
            )
        )
        await self._crash_hook(CrashPoint.START_DONE)
        async with self._transaction() as tx:
            intent = await tx.record_done(Effect.START, intents)
            tx.emit(SupervisorStartedEvent(created=created, times=intent.times))
        return intent

    async def _lost_attempt(
        self, job: JobRecord, intents: Mapping[str, Intent]
    ) -> LostAttempt | None:
        """The attempt that a supervisor of this stay on the cluster has formed and not ended: if
        the next one finds nothing of it there, it is lost."""
        if not intents[Effect.START].times:
            return None
        async with self._store.read() as session:
            attempt = await queries.newest_attempt(session, job.id)
        if attempt is None or attempt.state == "ended":
            return None
        return LostAttempt(attempt.number, attempt.world_size, job.step)

    async def _record_absence(self, job: JobRecord, intents: Mapping[str, Intent]) -> None:
        """If nothing is left of a job that was on the cluster, no device was held for it since its
        last sign of life. Stored before anything of it starts again; repeated, it changes
        nothing."""
        started = intents.get(Effect.START)
        if not (started and started.times) or job.id in await self._cluster.jobs_present():
            return
        async with self._transaction() as tx:
            if not tx.state.terminal:
                await job_row_stats.record_gone(tx)

    def _readable_spec(self, job: JobRecord) -> JobSpec:
        """Raises LaunchRefused for a new job whose spec this version cannot read; SpecUnreadable
        for one that has run, whose supervisor may live: it waits for a server of its version."""
        try:
            return spec_of(job)
        except SpecUnreadable as error:
            if job.attempt:
                raise
            raise LaunchRefused(error.code, str(error)) from error

    async def _avoided_at_start(self) -> dict[str, Avoided]:
        """The avoided nodes, from a fresh transaction.

        The transaction also checks the lease: it may have been lost since the job was read, and
        only its holder may start a supervisor.
        """
        admitted, self._admitted = self._admitted, None
        if admitted is not None and time.monotonic() - admitted[0] < _AVOIDED_FRESH_S:
            return admitted[1]
        async with self._transaction() as tx:
            return await self._avoided_by(tx)

    async def _avoided_by(self, tx: JobTransaction) -> dict[str, Avoided]:
        """The nodes that this job avoids: those set aside, and those that do not suit it."""
        return {**await nodes.avoided(tx.session, tx.now), **await self._unsuitable(tx)}

    async def _unsuitable(self, tx: JobTransaction) -> dict[str, Avoided]:
        found = await self._competing_demand.shortcomings(tx.session, tx.now)
        return found.of(lambda: needs_of(JobSpec.model_validate(tx.job.spec)))

    # ---- running

    async def _observe(self, job: JobRecord, intents: dict[str, Intent]) -> NextStep:
        """Fetch and store the supervisor's report."""
        report = await self._cluster.poll(job.id, projection.cursors_of(job))
        self._silent_since = None
        if report.phase is not Phase.ENDED:
            self._ended_since = None  # it may be of an earlier stay on the cluster
        await self._send_avoided(job, report)
        await self._send_size(job, report)
        await self._crash_hook(CrashPoint.POLLED)
        pause = self._until_poll(job)
        if not projection.has_changes(job, report, time.time()):
            self._news.start(projection.cursors_of(job))
            return pause
        restarted = intents[Effect.START].times > 1
        async with self._transaction(self._store if pause.urgent else self._polling_store) as tx:
            absorbed = await projection.store_report(
                tx, report, self._settings.quarantine_rules, hold_end=not self._drained()
            )
            if absorbed.rows and restarted:
                # The job makes progress again, so the count of lost supervisors starts anew.
                (await tx.record_intent(Effect.START)).times = 1
            if report.phase is Phase.ENDED and not tx.state.terminal and self._drained():
                tx.end(
                    State.FAILED, "outcome_lost", "the job ended, but its outcome was not reported"
                )
            if is_held_for(tx.job) and await has_own_checkpoint(tx.session, job.id):
                self._hold.release_in_background(tx.job)
        await self._crash_hook(CrashPoint.ENDED if tx.state.terminal else CrashPoint.STORED)
        pause = self._until_poll(tx.job)
        more = self._ended_since is None or absorbed.rows or absorbed.lines
        if report.phase is Phase.ENDED and more:
            self._ended_since = time.monotonic()
        if absorbed.end_held or _is_truncated(report) or tx.state.terminal:
            return NextStep(0.0)
        if report.phase is not Phase.ENDED:
            self._news.start(projection.cursors_of(tx.job))
        if Effect.CANCEL in intents:
            return pause
        if tx.job.desired != Desired.RUNNING and tx.state is not State.PAUSING:
            return NextStep(0.0)  # the user has cancelled or paused the job meanwhile
        if tx.state is State.PAUSING:
            return NextStep(0.0) if report.phase is Phase.ENDED else pause
        if intents[Effect.START].done_at is not None and not restarted:
            self._cached = tx.job, intents  # as fresh as another read
        return pause

    def _until_poll(self, job: JobRecord) -> NextStep:
        urgent = (
            job.desired != Desired.RUNNING
            or State(job.state) is not State.RUNNING
            or self._store.watched_jobs.is_watched(job.id)
        )
        return NextStep(self._interval_s(urgent), urgent=urgent)

    async def _send_avoided(self, job: JobRecord, report: SupervisorReport) -> None:
        """Send the avoided nodes to a supervisor that has others: a restarted one knows only those
        at the job's start, and a late order may have replaced a newer one."""
        avoided_nodes = self._avoided()
        if avoided_nodes in (None, report.avoided) or report.phase is Phase.ENDED:
            return
        await self._cluster.avoid(job.id, avoided_nodes)

    async def _send_size(self, job: JobRecord, report: SupervisorReport) -> None:
        """Send the size of an elastic job to a supervisor that has another."""
        if job.spec["resources"].get("nodes") is None or report.phase is Phase.ENDED:
            return
        if report.size != (size := self._size_of(job)):
            await self._cluster.resize(job.id, size)

    def _drained(self) -> bool:
        """Whether the wait for late rows and lines of an ended job is over."""
        since = self._ended_since
        return since is not None and time.monotonic() - since > self._settings.pace.drain_deadline_s

    # ---- ending

    async def _cancel(self, job: JobRecord, intents: dict[str, Intent]) -> NextStep | None:
        """Send the stop order; None: it was sent, and the job is observed until it ends."""
        if State(job.state) is not State.CANCELLING:
            async with self._transaction() as tx:
                await tx.record_intent(Effect.CANCEL, intents)
                tx.transition(State.CANCELLING, reason="cancelled by the user")
            await self._crash_hook(CrashPoint.CANCEL_INTENDED)
            return NextStep(0.0)
        intent = intents[Effect.CANCEL]
        deadline = 0.0 if Effect.CANCEL_NOW in intents else intent.at + _stop_s(job)
        forced = max(deadline, intent.at) + self._settings.cancel_deadline_s
        if time.time() > forced or Effect.RELEASE in intents:  # the job was paused before
            return await self._cancel_by_force(job, intents)
        order = StopOrder(StopKind.CANCEL, "cancelled by the user", deadline)
        await self._send_stop(job, intents, Effect.CANCEL, order)
        return None

    async def _pause(self, job: JobRecord, intents: dict[str, Intent]) -> NextStep | None:
        """Pause the job as `_cancel` cancels one: it becomes PAUSED once its resources are
        released."""
        if State(job.state) is not State.PAUSING:
            async with self._transaction() as tx:
                if tx.job.desired == Desired.PAUSED:
                    await tx.record_intent(Effect.PAUSE, intents)
                    tx.transition(State.PAUSING, reason="paused by the user")
            await self._crash_hook(CrashPoint.PAUSE_INTENDED)
            return NextStep(0.0)
        if Effect.RELEASE in intents:
            return await self._finish_pause(job, intents)
        intent = intents[Effect.PAUSE]
        order = StopOrder(StopKind.PAUSE, "paused by the user", intent.at + _stop_s(job))
        await self._send_stop(job, intents, Effect.PAUSE, order)
        return None

    async def _send_stop(
        self, job: JobRecord, intents: Mapping[str, Intent], effect: Effect, order: StopOrder
    ) -> None:
        """Send the order in every step: the supervisor may have been restarted since."""
        await self._cluster.stop(job.id, order)
        if intents[effect].done_at is None:
            await self._crash_hook(_STOPPED[effect])
            async with self._transaction() as tx:
                await tx.record_done(effect, intents)

    async def _finish_pause(self, job: JobRecord, intents: Mapping[str, Intent]) -> NextStep:
        """PAUSING, and the supervisor has ended: release the job's resources."""
        if not await self._cluster.release(job.id):
            return NextStep(self._settings.pace.release_retry_s)
        await self._crash_hook(CrashPoint.PAUSED)
        async with self._transaction() as tx:
            if tx.state is not State.PAUSING:
                return NextStep(0.0)
            await tx.forget_intents(Effect.START, Effect.PAUSE, Effect.RELEASE)
            tx.job.slow = {}  # the next supervisor starts without stragglers
            tx.emit(JobReleasedEvent())
            tx.transition(State.PAUSED, reason="its state is saved")
            if tx.job.desired == Desired.RUNNING:  # resumed before the pause was complete
                resumed = Effect.PAUSE in intents
                if resumed:
                    tx.job.queued_at = 0.0  # its age begins anew
                why = "resumed by the user" if resumed else "it was given back"
                tx.transition(State.QUEUED, reason=why)
                tx.wait_for("nodes", "it has given its nodes back")  # and keeps its place
            elif tx.job.desired == Desired.CANCELLED:
                tx.end(State.CANCELLED, "cancelled", "cancelled during the pause")
        return NextStep(0.0)

    async def _cancel_by_force(self, job: JobRecord, intents: Mapping[str, Intent]) -> NextStep:
        """Release the resources of a job that did not end in time, then record its end."""
        await self._record_absence(job, intents)
        await self.take_last_report()
        if not await self._cluster.release(job.id):
            return NextStep(self._settings.pace.release_retry_s)
        async with self._transaction() as tx:
            if not tx.state.terminal:
                tx.end(
                    State.CANCELLED,
                    "cancelled",
                    "cancelled; the supervisor had ended or did not answer in time, so the job's "
                    "resources were released",
                )
        await self._crash_hook(CrashPoint.ENDED)
        return NextStep(0.0)

    async def _clean_up(self, job: JobRecord, intents: dict[str, Intent]) -> NextStep | None:
        """Terminal: release everything that the job has on the cluster."""
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
                    tx.emit(JobReleasedEvent())
        if is_held_for(job) and not await self._hold.release(job):
            return NextStep(self._settings.pace.error_retry_max_s, keep_lease=False)
        async with self._transaction() as tx:
            await close_incidents_of_ended_job(tx)
            tx.job.cleaned = True
        return None

    async def _retry_clean_up(self, intent: Intent | None) -> NextStep:
        if intent is None or time.time() - intent.at <= self._settings.pace.release_deadline_s:
            return NextStep(self._settings.pace.release_retry_s)
        async with self._transaction() as tx:
            tx.wait_for(
                "release",
                f"resources of the job are still on the cluster after "
                f"{self._settings.pace.release_deadline_s:g} s; the release is retried",
                event=ReleaseOverdueEvent,
            )
        return NextStep(self._settings.pace.error_retry_max_s, keep_lease=False)

    # ---- unanswered calls

    async def _without_cluster(self, error: ClusterUnavailable) -> NextStep:
        async with self._transaction() as tx:
            if not tx.state.terminal:
                tx.wait_for("cluster", f"the cluster cannot be reached: {error}")
        # Another server may reach it, and the job keeps its place in the queue meanwhile.
        keeps_lease = tx.state is not State.QUEUED
        return NextStep(self._settings.pace.cluster_retry_s, keep_lease=keeps_lease)

    async def _without_supervisor(
        self, job: JobRecord, intents: dict[str, Intent], error: SupervisorUnavailable
    ) -> NextStep:
        """Wait for Ray to restart the supervisor; after a deadline, create or adopt it again."""
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
        waited = now - self._silent_since > self._settings.pace.supervisor_deadline_s
        if State(job.state) is State.CANCELLING and (
            waited or intents[Effect.START].done_at is None
        ):
            return await self._cancel_by_force(job, intents)
        if not waited:
            async with self._transaction() as tx:
                if tx.state is State.STARTING and _is_new(tx.job, intents[Effect.START], tx.now):
                    tx.wait_for(START_WAIT, SUPERVISOR_START, event=None)
                else:
                    tx.wait_for("supervisor", f"the supervisor does not answer: {error}")
            return NextStep(min(self._settings.pace.reconcile_interval_s, _SILENT_LOOK_S))
        if intents[Effect.START].times >= SUPERVISOR_STARTS:
            return await self._fail_supervisor_lost(job, intents, error)
        async with self._transaction() as tx:
            (await tx.record_intent(Effect.START)).done_at = None
        await self._crash_hook(CrashPoint.START_INTENDED)
        self._silent_since = None
        return NextStep(0.0)

    async def _fail_supervisor_lost(
        self, job: JobRecord, intents: Mapping[str, Intent], error: SupervisorUnavailable
    ) -> NextStep:
        """Fail a job whose supervisor was lost too often, instead of restarting it forever."""
        await self._record_absence(job, intents)
        if not await self._cluster.release(job.id):
            return NextStep(self._settings.pace.release_retry_s)
        async with self._transaction() as tx:
            if not tx.state.terminal:
                why = f"the supervisor was lost {SUPERVISOR_STARTS} times, at last: {error}"
                tx.end(State.FAILED, "supervisor_lost", why)
        await self._crash_hook(CrashPoint.ENDED)
        return NextStep(0.0)

    async def _fail_launch(self, error: LaunchRefused) -> NextStep:
        """End the job as failed: no later try would succeed."""
        async with self._transaction() as tx:
            if not tx.state.terminal:
                tx.end(State.FAILED, error.code, str(error))
        await self._crash_hook(CrashPoint.ENDED)
        return NextStep(0.0)

    # ---- the store

    def _transaction(
        self, store: Store | None = None
    ) -> AbstractAsyncContextManager[JobTransaction]:
        return job_transaction(store or self._store, self._lease.id, token=self._lease.token)

    async def _read(self) -> tuple[JobRecord, dict[str, Intent]]:
        async with self._store.read() as session:
            job = await session.get_one(JobRecord, self._lease.id)
            intents = await session.scalars(select(Intent).where(Intent.job_id == job.id))
            return job, {intent.name: intent for intent in intents}


def _initial_checkpoint(origin: dict[str, Any] | None) -> InitialCheckpoint | None:
    return None if origin is None else codec.restore(InitialCheckpoint, origin)


def _is_new(job: JobRecord, start: Intent, now: float) -> bool:
    """Whether the job's supervisor has not answered since the job was started, and is not late."""
    has_answered = job.told_at is not None and job.told_at >= start.at
    return not has_answered and now - start.at < _SUPERVISOR_START_S


def _stop_s(job: JobRecord) -> float:
    return JobSpec.model_validate(job.spec).stop_s


def _is_truncated(report: SupervisorReport) -> bool:
    """Whether the report reached its size limit, so that more can be fetched at once."""
    return len(report.rows) >= 100 or len(report.logs) >= 100 or len(report.events) >= 100
