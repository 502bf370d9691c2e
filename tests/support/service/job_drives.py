"""Starts and stops reconcilers in tests, and waits for states of their jobs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from tests.support.service.fake_cluster import FakeCluster, FakeSupervisor
from tests.support.waiting import DEADLINE_S

from holdfast_service.crash_points import CrashHook
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.supervisor_protocol import Cluster
from holdfast_service.reconcile.reconciler import Reconciler
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.views.jobs import JobView

JOB = {
    "name": "j",
    "parallel": {"dp_shard": 2, "tp": 2},
    "resources": {"workers_per_node": 2, "standby_nodes": 1},
}


@asynccontextmanager
async def reconciling(
    store: Store, cluster: Cluster, settings: Settings, crash_hook: CrashHook | None = None
) -> AsyncIterator[Reconciler]:
    reconciler = Reconciler(store, cluster, settings, crash_hook=crash_hook)
    stop = asyncio.Event()
    task = asyncio.create_task(reconciler.run(stop))
    try:
        yield reconciler
    finally:
        stop.set()
        await task


async def until(
    condition: Callable[[], Awaitable[bool] | bool], deadline_s: float = DEADLINE_S, what: str = ""
) -> None:
    """Wait for the condition; fails after the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        met = condition()
        if met if isinstance(met, bool) else await met:
            return
        assert time.monotonic() < end, f"{what or condition} did not happen within {deadline_s} s"
        await asyncio.sleep(0.01)


async def until_state(jobs: JobService, job_id: str, *states: State) -> JobView:
    async def there() -> bool:
        return (await jobs.get(job_id)).state in states

    await until(there, what=f"{job_id} to be {states}")
    return await jobs.get(job_id)


async def until_waits(jobs: JobService, job_id: str, resource: str) -> None:
    async def waits() -> bool:
        waiting = (await jobs.get(job_id)).waiting
        return waiting is not None and waiting.resource == resource

    await until(waits, what=f"{job_id} to wait for {resource}")


async def until_released(jobs: JobService, job_id: str) -> JobView:
    async def there() -> bool:
        return (await jobs.get(job_id)).released

    await until(there, what=f"{job_id} to be released")
    return await jobs.get(job_id)


async def submitted(jobs: JobService, cluster: FakeCluster, **changed: object) -> FakeSupervisor:
    """Submit a job; returns its supervisor once the reconciler has created it."""
    job, _ = await jobs.submit({**JOB, **changed})
    await until(lambda: job.id in cluster.supervisors, what="a supervisor")
    return cluster.supervisors[job.id]


async def all_digests(jobs: JobService, job_id: str) -> dict[int, str]:
    """Step -> digest."""
    return {item.step: item.digest for item in (await jobs.history.digests(job_id)).items}


async def kinds(jobs: JobService, job_id: str) -> list[str]:
    """The kinds of all events of the job, in order."""
    return [event.kind for event in (await jobs.history.events(job_id, limit=1000)).items]


async def until_kind(jobs: JobService, job_id: str, kind: str) -> None:
    """Wait until an event of this kind is stored."""

    async def there() -> bool:
        return kind in await kinds(jobs, job_id)

    await until(there, what=f"an event {kind}")
