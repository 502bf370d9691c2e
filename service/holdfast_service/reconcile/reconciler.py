"""Drives every job of a store to the state that its user desires.

Any number of reconcilers may run on one store. Each claims jobs by lease and drives every claimed
job in its own task, so a job that cannot be driven blocks no other. The store holds all state;
other reconcilers claim the jobs of a reconciler that dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from uuid import uuid4

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
from holdfast_service.store.leases import JobLease
from holdfast_service.store.models import JobRecord
from holdfast_service.store.transaction import LeaseLost, job_transaction

log = structlog.get_logger(__name__)

_LEAVE_TIMEOUT_S = 2.0
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
        self._owner = str(uuid4())
        self._reaper = Reaper(store, cluster, settings.release_unknown_jobs)
        self._init_sources = InitSources(store, settings)
        self._restored = RestoredJobs(cluster, settings)
        self._competing_demand = CompetingDemand(settings)
        self._poll_rate = PollRate(settings.polls_per_s)
        self._urgent_poll_rate = PollRate(settings.polls_per_s)
        self._news_rate = PollRate(settings.polls_per_s)
        self._urgent_jobs: set[str] = set()  # jobs that change state or are being watched
        self._avoided: dict[str, Avoided] | None = None  # not read yet
        self._lacked_nodes = LackedNodes()  # as last read
        self._drives: dict[str, asyncio.Task[None]] = {}
        self._job_wakes: dict[str, _WakeUp] = {}
        self._commanded: dict[str, tuple[int, int]] = {}  # see leases.commanded
        self._claim_wake = _WakeUp()
        self._nodes_wake = asyncio.Event()
        self._jobs_on_changed_nodes: set[str] = set()
        """Jobs with ranks on nodes whose standing has just changed."""
        self._undriven: set[JobLease] = set()  # result of the last check
        self._claimed_at: float | None = None
        self._stop = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Drive until `stop` is set, then release every lease. Never raises for a single job."""
        every = {
            self._claim: self._settings.claim_interval_s,
            self._renew: self._settings.lease_s / 3,
            self._refresh_nodes: self._settings.node_look_s,
            self._reap: self._settings.reap_interval_s,
        }
        self._stop = stop
        self._store.watched_jobs.on_watch_started = self.wake
        tasks = [
            asyncio.create_task(self._every(seconds, action)) for action, seconds in every.items()
        ]
        tasks.append(asyncio.create_task(self._measure_loop_lag()))
        try:
            await stop.wait()
            for wake in (self._claim_wake, self._nodes_wake, *self._job_wakes.values()):
                wake.set()
            await asyncio.wait(tasks, timeout=self._settings.stop_deadline_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._release_leases()

    def seconds_since_claim(self) -> float | None:
        """Seconds since the last successful claim, for readiness; None before the first."""
        return None if self._claimed_at is None else time.monotonic() - self._claimed_at

    def wake(self, job_id: str) -> None:
        """Drive this job now instead of at the next interval.

        Only for changes that this process made; each claim looks for those of other processes.
        """
        self._job_wakes.get(job_id, self._claim_wake).set()

    def wake_for_nodes(self, jobs: Iterable[str]) -> None:
        """The standing of nodes changed: inform the supervisors of these jobs now."""
        self._jobs_on_changed_nodes.update(jobs)
        self._nodes_wake.set()

    async def _claim(self) -> None:
        self._claim_wake.clear()
        room = self._settings.claim_limit - len(self._drives)
        taken = await leases.claim(self._store, self._owner, room)
        for lease in taken:
            self._job_wakes[lease.job_id] = wake = _WakeUp()
            task = asyncio.create_task(self._drive(lease, wake), name=f"drive {lease.job_id}")
            self._drives[lease.job_id] = task
        if len(taken) == leases.MAX_CLAIMED:
            self._claim_wake.set()  # there may be more
        self._claimed_at = time.monotonic()
        await self._wake_commanded()

    async def _wake_commanded(self) -> None:
        """Drive the jobs at once whose users gave a command through another server."""
        known, self._commanded = (
            self._commanded,
            await leases.commanded(self._store, self._owner) if self._drives else {},
        )
        for job_id, newest in self._commanded.items():
            if known.get(job_id) != newest and job_id in self._job_wakes:
                self._job_wakes[job_id].set()

    async def _renew(self) -> None:
        drives = dict(self._drives)
        kept = await leases.renew(self._store, self._owner, drives, self._settings.lease_s)
        for job_id in drives.keys() - kept:
            # The drive may have released its lease meanwhile, and a new drive may have started.
            if self._drives.get(job_id) is drives[job_id]:
                log.warning("lease.lost", job=job_id)
                drives[job_id].cancel()
                del self._drives[job_id]
        self._claim_wake.set()  # a new or an expired owner claims nothing before this
        await self._give_back_undriven()

    async def _give_back_undriven(self) -> None:
        """Release leases without a drive if two checks in a row find them.

        A lease that was claimed a moment ago has no drive yet.
        """
        undriven = await leases.undriven(self._store, self._owner, self._drives)
        for lease in undriven & self._undriven:
            log.warning("lease.undriven", job=lease.job_id)
            await leases.release(self._store, lease, 0.0)
            self._claim_wake.set()
        self._undriven = undriven

    async def _reap(self) -> None:
        await collect_garbage(self._store)
        try:
            for job_id in await self._reaper.sweep(self._drives):
                log.warning("reaped", job=job_id)
        except ClusterUnavailable as error:
            log.warning("reaper.waits", error=str(error))

    async def _refresh_nodes(self) -> None:
        """Record the present nodes and read the avoided nodes, for the drives' supervisors."""
        self._nodes_wake.clear()
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

    async def _drive(self, lease: JobLease, wake: _WakeUp) -> None:
        """Drive a job until it needs nothing for long, is finished, or its lease is lost."""
        driver = JobDriver(
            self._store,
            self._cluster,
            self._settings,
            self._crash_hook,
            lease,
            self._init_sources,
            lambda: self._avoided,
            lambda urgent: self._interval_s(lease.job_id, urgent),
            self._competing_demand,
            self._size_of,
            NewsWatch(self._cluster, lease.job_id, wake.set, self._news_delay_s),
            self._restored,
            lambda: self._store.growth,
        )
        try:
            due_in_s = await self._advance_until_idle(driver, lease, wake)
            await leases.release(self._store, lease, due_in_s)
            if due_in_s < self._settings.claim_interval_s:  # else another server may be faster
                asyncio.get_running_loop().call_later(due_in_s, self._claim_wake.set)
        except LeaseLost:
            log.warning("lease.lost", job=lease.job_id)
        except SQLAlchemyError as error:
            log.error("lease.kept", job=lease.job_id, exc_info=error)
        finally:
            await driver.close()
            self._urgent_jobs.discard(lease.job_id)
            if self._drives.get(lease.job_id) is asyncio.current_task():
                del self._drives[lease.job_id]
            if self._job_wakes.get(lease.job_id) is wake:
                del self._job_wakes[lease.job_id]
            if wake.is_set():
                self._claim_wake.set()  # set during the release: the job must be claimed again

    def _interval_s(self, job_id: str, urgent: bool) -> float:
        """Seconds between two polls of one job. All jobs share the allowed poll rate of this
        process; the few urgent jobs, for which a user waits, share the same rate among
        themselves."""
        settings = self._settings
        many = len(self._urgent_jobs) if urgent else len(self._drives)
        quiet = not urgent and not self._store.watched_jobs.is_looked_at(job_id)
        shortest_s = settings.reconcile_interval_s * (_QUIET_FACTOR if quiet else 1.0)
        return max(shortest_s, many / settings.polls_per_s)

    def _news_delay_s(self) -> float:
        """All jobs may have news at the same moment."""
        if len(self._drives) <= _MANY_DRIVES:
            return 0.0
        return self._news_rate.reserve(time.monotonic())

    async def _advance_until_idle(self, driver: JobDriver, lease: JobLease, wake: _WakeUp) -> float:
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
                self._urgent_jobs.add(lease.job_id)
            else:
                self._urgent_jobs.discard(lease.job_id)
            if self._stop.is_set():
                return 0.0
            due = time.monotonic() + next_step.delay_s
            woken = await _wait_until_set(wake, next_step.delay_s)
            if not woken and next_step.delay_s > 0 and len(self._drives) > _MANY_DRIVES:
                rate = self._urgent_poll_rate if next_step.urgent else self._poll_rate
                wait_s = rate.reserve(time.monotonic())
                due = time.monotonic() + wait_s
                woken = await _wait_until_set(wake, wait_s)
            if woken:
                due = min(due, wake.set_at)
                wake.clear()
                driver.invalidate()
            if self._stop.is_set():
                return 0.0

    async def _after_error(self, lease: JobLease, error: Exception, errors: int) -> NextStep:
        """Record the error as the job's wait reason; retry with exponential backoff."""
        seconds = min(
            self._settings.error_retry_s * 2.0 ** min(errors - 1, 20),
            self._settings.error_retry_max_s,
        )
        log.error("drive.failed", job=lease.job_id, retry_s=seconds, exc_info=error)
        try:
            async with job_transaction(self._store, lease.job_id, token=lease.token) as tx:
                tx.wait_for("reconciler", f"the job could not be driven: {error!r}")
        except SQLAlchemyError as again:
            # The store itself fails, so the error cannot be recorded there; the job is retried.
            log.error("drive.unrecorded", job=lease.job_id, exc_info=again)
        return NextStep(seconds)

    async def _measure_loop_lag(self) -> None:
        """Measure how busy and how late the event loop is, and adjust the poll rate."""
        while not self._stop.is_set():
            if len(self._drives) <= _MANY_DRIVES:
                await _wait_until_set(self._stop, _LAG_PAUSE_S)
                continue
            began, used, late_s = time.monotonic(), time.thread_time(), 0.0
            for _ in range(_LAG_SAMPLES):
                began_sample = time.monotonic()
                await _wait_until_set(self._stop, _LAG_SAMPLE_S)
                late_s += time.monotonic() - began_sample - _LAG_SAMPLE_S
            busy_share = (time.thread_time() - used) / (time.monotonic() - began)
            self._poll_rate.adjust(busy_share, late_s / _LAG_SAMPLES)

    async def _every(self, seconds: float, action: Callable[[], Awaitable[None]]) -> None:
        """Call `action` periodically; an exception ends only that call."""
        wakes: dict[Callable[[], Awaitable[None]], asyncio.Event] = {
            self._claim: self._claim_wake,
            self._refresh_nodes: self._nodes_wake,
        }
        while True:
            try:
                await action()
            except Exception as error:
                log.error("periodic_action.failed", action=action.__name__, exc_info=error)
            await _wait_until_set(wakes.get(action, self._stop), seconds)
            if self._stop.is_set():
                return

    async def _release_leases(self) -> None:
        """Wait until the running drives release their leases; cancel those that take too long."""
        drives = list(self._drives.values())
        if drives:
            _, late = await asyncio.wait(drives, timeout=self._settings.stop_deadline_s)
            for drive in late:
                drive.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        with contextlib.suppress(SQLAlchemyError, OSError, TimeoutError):  # the lease expires then
            async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                await leases.leave(self._store, self._owner)


async def _wait_until_set(wake: asyncio.Event, seconds: float) -> bool:
    """Wait until the event is set or the time is over; True if it is set."""
    if seconds <= 0:
        await asyncio.sleep(0)
    else:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(wake.wait(), timeout=seconds)
    return wake.is_set()
