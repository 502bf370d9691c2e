"""Drives every job of a store to the state that its user desires.

Any number of reconcilers may run on one store. Each claims jobs by lease and drives every claimed
job in its own task, so a job that cannot be driven blocks no other. The store holds all state;
other reconcilers claim the jobs of a reconciler that dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

import structlog
from sqlalchemy.exc import SQLAlchemyError

from holdfast_service import crash_points
from holdfast_service.crash_points import CrashHook
from holdfast_service.job_model.admission import Claim, LackedNodes, NodeDemand
from holdfast_service.job_model.cluster_growth import GrowthBounds, plan_growth
from holdfast_service.job_model.supervisor_protocol import (
    Capacity,
    Cluster,
    ClusterUnavailable,
    SizeOrder,
)
from holdfast_service.policy.quarantine import Avoided, NodeStanding
from holdfast_service.reconcile.cluster_demand import CompetingDemand, LiveDemand
from holdfast_service.reconcile.job_driver import JobDriver, NextStep
from holdfast_service.reconcile.news_watch import NewsWatch
from holdfast_service.reconcile.poll_rate import PollRate
from holdfast_service.reconcile.reaper import Reaper
from holdfast_service.reconcile.restored_job import RestoredJobs
from holdfast_service.services.code_packages import collect_garbage
from holdfast_service.services.init_sources import InitSources
from holdfast_service.settings import Settings
from holdfast_service.store import leases, nodes
from holdfast_service.store.engine import Store
from holdfast_service.store.lease_holder import LeaseHolder, repeat, wait_until_set
from holdfast_service.store.leases import LeaseLost, RowLease
from holdfast_service.store.models import JobRecord
from holdfast_service.store.transaction import job_transaction

log = structlog.get_logger(__name__)

CLAIM_LIMIT = 10_000
"""Most jobs that one reconciler drives at the same time."""
_WAITED_FOR = Avoided(NodeStanding.CORDONED, "another job waits for it")
_MANY_DRIVES = 100
"""Above this number of jobs, the poll rate adapts to the server's load."""
_QUIET_FACTOR = 2.5
"""The interval between two polls of a job is this many times longer while no user looks at it."""
_LAG_SAMPLES, _LAG_SAMPLE_S = 5, 0.05
"""Samples of the event loop's lag per adjustment of the poll rate, and their interval."""
_LAG_PAUSE_S = 1.0
"""Pause between two checks of the number of jobs while there are few."""


class _WakeUp(asyncio.Event):
    set_at = 0.0
    """Time at which the event was first set since its last clear (monotonic)."""

    def set(self) -> None:
        if not self.is_set():
            self.set_at = time.monotonic()
        super().set()


class Reconciler:
    """Drives every job of the store that no other reconciler holds."""

    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        settings: Settings,
        *,
        crash_hook: CrashHook | None = None,
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._settings = settings
        self._crash_hook = crash_hook or crash_points.hook_from_setting(settings.crash_at)
        self._leases = LeaseHolder(store, JobRecord, settings, CLAIM_LIMIT, self._drive)
        self._reaper = Reaper(store, cluster, settings.release_unknown_jobs)
        self._init_sources = InitSources(store, settings)
        self._restored = RestoredJobs(cluster, settings)
        self._competing_demand = CompetingDemand(settings)
        self._poll_rate = PollRate(settings.pace.polls_per_s)
        self._urgent_poll_rate = PollRate(settings.pace.polls_per_s)
        self._news_rate = PollRate(settings.pace.polls_per_s)
        self._urgent_jobs: set[str] = set()  # jobs that change state or are being watched
        self._avoided: dict[str, Avoided] | None = None  # not read yet
        self._lacked_nodes = LackedNodes()  # as last read
        self._job_wakes: dict[str, _WakeUp] = {}
        self._commanded: dict[str, tuple[int, int]] = {}  # see leases.commanded
        self._nodes_wake = asyncio.Event()
        self._jobs_on_changed_nodes: set[str] = set()
        """Jobs with ranks on nodes whose standing has just changed."""
        self._stop = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Drive until `stop` is set, then release every lease. Never raises for a single job."""
        settings, self._stop = self._settings, stop
        self._store.watched_jobs.on_watch_started = self.wake
        loops = (
            self._leases.keep(stop),
            repeat(self._wake_commanded, settings.pace.claim_interval_s, stop),
            repeat(self._refresh_nodes, settings.pace.node_look_s, stop, self._nodes_wake),
            repeat(self._reap, settings.pace.reap_interval_s, stop),
            self._measure_loop_lag(),
        )
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            await stop.wait()
            self._leases.wake()
            for wake in (self._nodes_wake, *self._job_wakes.values()):
                wake.set()
            await asyncio.wait(tasks, timeout=settings.pace.stop_deadline_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._leases.leave(settings.pace.stop_deadline_s)

    def seconds_since_claim(self) -> float | None:
        """Seconds since the last successful claim, for readiness; None before the first."""
        claimed_at = self._leases.claimed_at
        return None if claimed_at is None else time.monotonic() - claimed_at

    def wake(self, job_id: str) -> None:
        """Drive this job now instead of at the next interval.

        Only for changes that this process made; each claim looks for those of other processes.
        """
        wake = self._job_wakes.get(job_id)
        if wake is None:
            self._leases.wake()
        else:
            wake.set()

    def wake_for_nodes(self, jobs: Iterable[str]) -> None:
        """The standing of nodes changed: inform the supervisors of these jobs now."""
        self._jobs_on_changed_nodes.update(jobs)
        self._nodes_wake.set()

    async def _wake_commanded(self) -> None:
        """Drive the jobs at once whose users gave a command through another server."""
        known, self._commanded = (
            self._commanded,
            await leases.commanded(self._store, self._leases.owner) if self._leases.tasks else {},
        )
        for job_id, newest in self._commanded.items():
            if known.get(job_id) != newest and job_id in self._job_wakes:
                self._job_wakes[job_id].set()

    async def _reap(self) -> None:
        await collect_garbage(self._store)
        try:
            for job_id in await self._reaper.sweep(self._leases.tasks):
                log.warning("reaped", job=job_id)
        except ClusterUnavailable as error:
            log.warning("reaper.waits", error=str(error))

    async def _refresh_nodes(self) -> None:
        """Record the present nodes and read the avoided nodes, for the drives' supervisors."""
        async with self._store.read() as session:
            self._avoided = aside = await nodes.avoided(session, time.time())
        users, self._jobs_on_changed_nodes = self._jobs_on_changed_nodes, set()
        for job_id in users:
            self.wake(job_id)
        with contextlib.suppress(ClusterUnavailable):  # the drives report it
            capacity = await self._cluster.capacity()
            now = time.time()
            async with self._store.write() as session:
                await nodes.record_seen(session, capacity.nodes, now)
            async with self._store.read() as session:
                demand = await self._competing_demand.of_all_jobs(
                    session, now, settled=capacity.can_grow
                )
            self._lacked_nodes = LackedNodes(capacity, aside, demand.unsettled)
            if capacity.can_grow:
                await self._grow(capacity, aside, demand)

    async def _grow(
        self, capacity: Capacity, aside: Mapping[str, Avoided], demand: LiveDemand
    ) -> None:
        """Ask for the nodes that the queue lacks now. Every server does so, with the same names.
        Raises ClusterUnavailable."""
        settings = self._settings
        plan = plan_growth(
            capacity,
            aside,
            demand.held,
            demand.queue,
            [self._off_lacked_nodes(claim) for claim in demand.growing],
            GrowthBounds(
                settings.autoscale_nodes, settings.autoscale_cpus, settings.autoscale_gpus
            ),
        )
        await self._cluster.ask_for_nodes(plan.requests.values(), plan.may_start)
        self._store.growth = plan

    def _off_lacked_nodes(self, claim: Claim) -> Claim:
        off = dict.fromkeys(self._lacked_nodes.beside(claim.job), _WAITED_FOR)
        return replace(claim, unusable={**claim.unusable, **off})

    def _size_of(self, job: JobRecord) -> SizeOrder:
        """The size that an elastic job is to have beside the others."""
        if job.id in self._store.growth.held_back:
            return SizeOrder(job.wanted_nodes, is_held=True)
        others = self._lacked_nodes.beside(job.id)
        if not others:
            return SizeOrder(job.wanted_nodes)
        demand = NodeDemand.from_stored_spec(job.spec)
        none_left = demand is None or self._lacked_nodes.leaves_none(job.id, demand)
        return SizeOrder(job.wanted_nodes, True, None if none_left else tuple(sorted(others)))

    async def _drive(self, lease: RowLease) -> float:
        """Drive a job until it needs nothing for long, or is finished. Returns the seconds until it
        must be claimed again. Raises LeaseLost."""
        wake = self._job_wakes[lease.id] = _WakeUp()
        driver = JobDriver(
            self._store,
            self._cluster,
            self._settings,
            self._crash_hook,
            lease,
            self._init_sources,
            lambda: self._avoided,
            lambda urgent: self._interval_s(lease.id, urgent),
            self._competing_demand,
            self._size_of,
            NewsWatch(self._cluster, lease.id, wake.set, self._news_delay_s),
            self._restored,
            lambda: self._store.growth,
        )
        try:
            return await self._advance_until_idle(driver, lease, wake)
        finally:
            self._urgent_jobs.discard(lease.id)
            if self._job_wakes.get(lease.id) is wake:
                del self._job_wakes[lease.id]
            await driver.close()

    def _interval_s(self, job_id: str, urgent: bool) -> float:
        """Seconds between two polls of one job. All jobs share the allowed poll rate of this
        process; the few urgent jobs, for which a user waits, share the same rate among
        themselves."""
        settings = self._settings
        many = len(self._urgent_jobs) if urgent else len(self._leases.tasks)
        quiet = not urgent and not self._store.watched_jobs.is_looked_at(job_id)
        shortest_s = settings.pace.reconcile_interval_s * (_QUIET_FACTOR if quiet else 1.0)
        return max(shortest_s, many / settings.pace.polls_per_s)

    def _news_delay_s(self) -> float:
        """All jobs may have news at the same moment."""
        if len(self._leases.tasks) <= _MANY_DRIVES:
            return 0.0
        return self._news_rate.reserve(time.monotonic())

    async def _advance_until_idle(self, driver: JobDriver, lease: RowLease, wake: _WakeUp) -> float:
        """Returns the seconds until the job must be claimed again."""
        errors = 0
        due = time.monotonic()
        while True:
            try:
                next_step = await driver.advance()
                errors = 0
                self._store.reconcile_lag.add(time.monotonic() - due)
            except LeaseLost:
                raise
            except Exception as error:
                errors += 1
                next_step = await self._after_error(lease, error, errors)
            if next_step is None:
                return 0.0
            if not next_step.keep_lease:
                return next_step.delay_s
            if next_step.urgent:
                self._urgent_jobs.add(lease.id)
            else:
                self._urgent_jobs.discard(lease.id)
            if self._stop.is_set():
                break
            due = time.monotonic() + next_step.delay_s
            woken = await wait_until_set(wake, next_step.delay_s)
            if not woken and next_step.delay_s > 0 and len(self._leases.tasks) > _MANY_DRIVES:
                rate = self._urgent_poll_rate if next_step.urgent else self._poll_rate
                wait_s = rate.reserve(time.monotonic())
                due = time.monotonic() + wait_s
                woken = await wait_until_set(wake, wait_s)
            if woken:
                due = min(due, wake.set_at)
                wake.clear()
                driver.invalidate()
            if self._stop.is_set():
                break
        await driver.take_last_report()  # the cluster may end with this server
        return 0.0

    async def _after_error(self, lease: RowLease, error: Exception, errors: int) -> NextStep:
        """Record the error as the job's wait reason; retry with exponential backoff."""
        seconds = min(
            self._settings.pace.error_retry_s * 2.0 ** min(errors - 1, 20),
            self._settings.pace.error_retry_max_s,
        )
        log.error("drive.failed", job=lease.id, retry_s=seconds, exc_info=error)
        try:
            async with job_transaction(self._store, lease.id, token=lease.token) as tx:
                tx.wait_for("reconciler", f"the job could not be driven: {error!r}")
        except SQLAlchemyError as again:
            # The store itself fails, so the error cannot be recorded there; the job is retried.
            log.error("drive.unrecorded", job=lease.id, exc_info=again)
        return NextStep(seconds)

    async def _measure_loop_lag(self) -> None:
        """Measure how busy and how late the event loop is, and adjust the poll rate."""
        while not self._stop.is_set():
            if len(self._leases.tasks) <= _MANY_DRIVES:
                await wait_until_set(self._stop, _LAG_PAUSE_S)
                continue
            began, used, late_s = time.monotonic(), time.thread_time(), 0.0
            for _ in range(_LAG_SAMPLES):
                began_sample = time.monotonic()
                await wait_until_set(self._stop, _LAG_SAMPLE_S)
                late_s += time.monotonic() - began_sample - _LAG_SAMPLE_S
            busy_share = (time.thread_time() - used) / (time.monotonic() - began)
            self._poll_rate.adjust(busy_share, late_s / _LAG_SAMPLES)
