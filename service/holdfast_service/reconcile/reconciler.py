"""The drive from what users want to what the cluster does, for every job of a store.

Any number of reconcilers may run on one store: each claims jobs by lease and drives each claimed
job in a task of its own, so that a job which cannot be driven holds up no other. What is true is
in the store; a reconciler that dies is replaced by whoever claims its jobs next.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from uuid import uuid4

import structlog
from sqlalchemy.exc import SQLAlchemyError

from holdfast_service import crash_points
from holdfast_service.crash_points import CrashHook
from holdfast_service.job_model.supervisor_protocol import Cluster, ClusterUnavailable
from holdfast_service.policy.quarantine import Avoided
from holdfast_service.reconcile.cluster_demand import CompetingDemand
from holdfast_service.reconcile.job_driver import JobDriver, NextTurn
from holdfast_service.reconcile.poll_rate import PollRate
from holdfast_service.reconcile.reaper import Reaper
from holdfast_service.services.init_sources import InitSources
from holdfast_service.settings import Settings
from holdfast_service.store import leases, nodes
from holdfast_service.store.engine import Store
from holdfast_service.store.leases import JobLease
from holdfast_service.store.transaction import LeaseLost, job_transaction

log = structlog.get_logger(__name__)

_LEAVE_TIMEOUT_S = 2.0
_MANY_DRIVES = 100
"""More than so many jobs are polled at a pace that the server's other work leaves room for."""
_LAG_SAMPLES, _LAG_SAMPLE_S = 5, 0.05
"""Until the pace is set anew, by how late the loop was at each."""


class _WakeUp(asyncio.Event):
    set_at = 0.0
    """When somebody rang first since it was last answered (monotonic)."""

    def set(self) -> None:
        if not self.is_set():
            self.set_at = time.monotonic()
        super().set()


class Reconciler:
    """Drives every job of the store that nobody else holds."""

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
        self._reaper = Reaper(store, cluster)
        self._init_sources = InitSources(store, settings)
        self._competition = CompetingDemand()
        self._poll_rate = PollRate(settings.polls_per_s)
        self._urgent_poll_rate = PollRate(settings.polls_per_s)
        self._urgent_jobs: set[str] = set()  # jobs that do not merely run, or are looked at
        self._avoided: dict[str, Avoided] | None = None  # nobody has looked yet
        self._drives: dict[str, asyncio.Task[None]] = {}
        self._job_wakes: dict[str, _WakeUp] = {}
        self._claim_wake = _WakeUp()
        self._nodes_wake = asyncio.Event()
        self._jobs_on_changed_nodes: set[str] = set()  # jobs that have ranks on nodes set aside just now
        self._undriven: set[JobLease] = set()  # as it was last looked for
        self._claimed_at: float | None = None
        self._stop = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Drive until `stop` is set, then hand every lease back. Never raises for one job."""
        every = {
            self._claim: self._settings.claim_interval_s,
            self._renew: self._settings.lease_s / 3,
            self._refresh_nodes: self._settings.node_look_s,
            self._reap: self._settings.reap_interval_s,
        }
        self._stop = stop
        self._store.active_requests.on_watch_started = self.ring
        tasks = [
            asyncio.create_task(self._every(seconds, duty)) for duty, seconds in every.items()
        ]
        tasks.append(asyncio.create_task(self._measure_loop_lag()))
        try:
            await stop.wait()
            for wake in (self._claim_wake, self._nodes_wake, *self._job_wakes.values()):
                wake.set()
            await asyncio.wait(tasks, timeout=self._settings.stop_deadline_s)
        finally:
            for duty in tasks:
                duty.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._release_leases()

    def seconds_since_claim(self) -> float | None:
        """Since the last successful look for work; None: never yet (for readiness)."""
        return None if self._claimed_at is None else time.monotonic() - self._claimed_at

    def ring(self, job_id: str) -> None:
        """Something is to be done for this job: look now instead of at the next interval.

        Only for what this process itself brought about; of the rest the intervals take care.
        """
        self._job_wakes.get(job_id, self._claim_wake).set()

    def wake_for_nodes(self, jobs: Iterable[str]) -> None:
        """Nodes were set aside or taken back: tell the supervisors of the jobs there now."""
        self._jobs_on_changed_nodes.update(jobs)
        self._nodes_wake.set()

    async def _claim(self) -> None:
        self._claim_wake.clear()
        room = self._settings.claim_limit - len(self._drives)
        taken = await leases.claim(self._store, self._owner, room, self._settings.lease_s)
        for lease in taken:
            self._job_wakes[lease.job_id] = wake = _WakeUp()
            task = asyncio.create_task(self._drive(lease, wake), name=f"drive {lease.job_id}")
            self._drives[lease.job_id] = task
        if len(taken) == leases.MAX_CLAIMED:
            self._claim_wake.set()  # there may be more
        self._claimed_at = time.monotonic()

    async def _renew(self) -> None:
        drives = dict(self._drives)
        kept = await leases.renew(self._store, self._owner, drives, self._settings.lease_s)
        for job_id in drives.keys() - kept:
            # Meanwhile the drive may have given its lease back by itself, and a new one begun.
            if self._drives.get(job_id) is drives[job_id]:
                log.warning("lease.lost", job=job_id)
                drives[job_id].cancel()
                del self._drives[job_id]
        await self._give_back_undriven()

    async def _give_back_undriven(self) -> None:
        """Seen twice: of what was taken a moment ago, the drives have yet to begin."""
        undriven = await leases.undriven(self._store, self._owner, self._drives)
        for lease in undriven & self._undriven:
            log.warning("lease.undriven", job=lease.job_id)
            await leases.release(self._store, lease, 0.0)
            self._claim_wake.set()
        self._undriven = undriven

    async def _reap(self) -> None:
        try:
            for job_id in await self._reaper.sweep(self._drives):
                log.warning("reaped", job=job_id)
        except ClusterUnavailable as error:
            log.warning("reaper.waits", error=str(error))

    async def _refresh_nodes(self) -> None:
        """Who is there, and who is set aside: the drives tell their supervisors."""
        self._nodes_wake.clear()
        users, self._jobs_on_changed_nodes = self._jobs_on_changed_nodes, set()
        if users:
            await self._read_avoided()
            for job_id in users:
                self.ring(job_id)
        with contextlib.suppress(ClusterUnavailable):  # those whom it concerns say so
            capacity = await self._cluster.capacity()
            async with self._store.write() as session:
                await nodes.record_seen(session, capacity.nodes, time.time())
        await self._read_avoided()

    async def _read_avoided(self) -> None:
        async with self._store.read() as session:
            self._avoided = await nodes.avoided(session, time.time())

    async def _drive(self, lease: JobLease, wake: _WakeUp) -> None:
        """Turn after turn, until the job rests for long, has no work left, or is lost."""
        driver = JobDriver(
            self._store,
            self._cluster,
            self._settings,
            self._crash_hook,
            lease,
            self._init_sources,
            lambda: self._avoided,
            self._interval_s,
            self._competition,
        )
        try:
            next_turn = await self._advance_until_idle(driver, lease, wake)
            await leases.release(self._store, lease, next_turn)
            asyncio.get_running_loop().call_later(next_turn, self._claim_wake.set)
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
                self._claim_wake.set()  # it rang while the job was given back: somebody is to look

    def _interval_s(self, urgent: bool) -> float:
        """Between two polls of one job: many jobs share what this process may poll; the few in
        motion, for which somebody waits, have as much among themselves."""
        settings = self._settings
        many = len(self._urgent_jobs) if urgent else len(self._drives)
        return max(settings.reconcile_interval_s, many / settings.polls_per_s)

    async def _advance_until_idle(self, driver: JobDriver, lease: JobLease, wake: _WakeUp) -> float:
        """Returns after how many seconds the job wants to be looked at again."""
        errors = 0
        due = time.monotonic()
        while True:
            try:
                next_turn = await driver.advance()
                errors = 0
                self._store.reconcile_lag.add(time.monotonic() - due)
            except LeaseLost:
                raise
            except Exception as error:
                errors += 1
                next_turn = await self._after_error(lease, error, errors)
            if next_turn is None:
                return 0.0
            if not next_turn.keep_lease:
                return next_turn.seconds
            if next_turn.urgent:
                self._urgent_jobs.add(lease.job_id)
            else:
                self._urgent_jobs.discard(lease.job_id)
            if self._stop.is_set():
                return 0.0
            due = time.monotonic() + next_turn.seconds
            woken = await _wait_until_set(wake, next_turn.seconds)
            if not woken and next_turn.seconds > 0 and len(self._drives) > _MANY_DRIVES:
                pace = self._urgent_poll_rate if next_turn.urgent else self._poll_rate
                wait_s = pace.reserve(time.monotonic())
                due = time.monotonic() + wait_s
                woken = await _wait_until_set(wake, wait_s)
            if woken:
                due = min(due, wake.set_at)
                wake.clear()
                driver.invalidate()
            if self._stop.is_set():
                return 0.0

    async def _after_error(self, lease: JobLease, error: Exception, errors: int) -> NextTurn:
        """Say it where the user looks, and try again later and later."""
        seconds = min(
            self._settings.error_retry_s * 2.0 ** min(errors - 1, 20),
            self._settings.error_retry_max_s,
        )
        log.error("drive.failed", job=lease.job_id, retry_s=seconds, exc_info=error)
        try:
            async with job_transaction(self._store, lease.job_id, token=lease.token) as tx:
                tx.wait_for("reconciler", f"it could not be driven: {error!r}")
        except SQLAlchemyError as again:
            # The store itself is in trouble: then it cannot be told there, and is tried again.
            log.error("drive.unrecorded", job=lease.job_id, exc_info=again)
        return NextTurn(seconds)

    async def _measure_loop_lag(self) -> None:
        """How busy the loop is, and how late, for the pace of the polls."""
        while not self._stop.is_set():
            began, used, late_s = time.monotonic(), time.thread_time(), 0.0
            for _ in range(_LAG_SAMPLES):
                at = time.monotonic()
                await _wait_until_set(self._stop, _LAG_SAMPLE_S)
                late_s += time.monotonic() - at - _LAG_SAMPLE_S
            busy_share = (time.thread_time() - used) / (time.monotonic() - began)
            self._poll_rate.adjust(busy_share, late_s / _LAG_SAMPLES)

    async def _every(self, seconds: float, duty: Callable[[], Awaitable[None]]) -> None:
        """Do the duty again and again; an error in one round does not end the rounds."""
        wakes: dict[Callable[[], Awaitable[None]], asyncio.Event] = {
            self._claim: self._claim_wake,
            self._refresh_nodes: self._nodes_wake,
        }
        while True:
            try:
                await duty()
            except Exception as error:
                log.error("duty.failed", duty=duty.__name__, exc_info=error)
            await _wait_until_set(wakes.get(duty, self._stop), seconds)
            if self._stop.is_set():
                return

    async def _release_leases(self) -> None:
        """Wait for the turns under way; each gives its lease back. Those too slow are cut off."""
        drives = list(self._drives.values())
        if drives:
            _, late = await asyncio.wait(drives, timeout=self._settings.stop_deadline_s)
            for drive in late:
                drive.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        with contextlib.suppress(SQLAlchemyError, OSError, TimeoutError):  # then its time runs out
            async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                await leases.leave(self._store, self._owner)


async def _wait_until_set(wake: asyncio.Event, seconds: float) -> bool:
    """Wait until the bell rings, or the time is over; True if it rang."""
    if seconds <= 0:
        await asyncio.sleep(0)
    else:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(wake.wait(), timeout=seconds)
    return wake.is_set()
