"""A reconciler's process is killed between a transition and its effect, or after the effect.

At every crash point, the successor completes the job with exactly one supervisor, without a lost
or duplicate event, and leaves nothing on the cluster.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.service.durable_cluster import STEPS, DurableCluster
from tests.support.service.forked_reconcilers import (
    ForkedReconciler,
    ReconcilerOrigin,
    reconciler_origin,
)
from tests.support.service.job_drives import (
    JOB,
    all_digests,
    reconciling,
    until,
    until_released,
    until_state,
)
from tests.support.waiting import DEADLINE_S

from holdfast_service.crash_points import CrashPoint
from holdfast_service.job_model.lifecycle import State
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.views.jobs import JobView

pytestmark = pytest.mark.chaos
MARKED = {CrashPoint.SUBMITTED, CrashPoint.START_DONE, CrashPoint.ENDED}
CANCELS = {CrashPoint.CANCEL_INTENDED, CrashPoint.CANCEL_DONE}
OPERATIONS = {point for point in CrashPoint if point.startswith("operation.")}
PAUSES = {CrashPoint.PAUSE_INTENDED, CrashPoint.PAUSE_DONE, CrashPoint.PAUSED}


@pytest.fixture(scope="module")
def origin() -> Iterator[ReconcilerOrigin]:
    with reconciler_origin() as started:
        yield started


async def endless_job(
    origin: ReconcilerOrigin, settings: Settings, store: Store, tmp_path: Path, point: CrashPoint
) -> tuple[DurableCluster, JobService, JobView, ForkedReconciler]:
    """A running job, which trains until it is stopped, and its reconciler, which is killed at the
    crash point."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    cluster = DurableCluster(folder)
    jobs = JobService(store, cluster, settings)
    job, _ = await jobs.submit({**JOB, "name": "endless"})
    fatal = settings.model_copy(update={"crash_at": point.value})
    process = origin.fork(fatal, folder)
    await until_state(jobs, job.id, State.RUNNING)
    return cluster, jobs, job, process


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(CrashPoint.START_DONE, marks=pytest.mark.cell("P6", "database")),
        pytest.param(CrashPoint.ENDED, marks=pytest.mark.cell("P7", "server")),
        *sorted(set(CrashPoint) - PAUSES - OPERATIONS - MARKED),
    ],
)
async def test_a_crash_at_any_crash_point_loses_nothing(
    origin: ReconcilerOrigin, settings: Settings, store: Store, tmp_path: Path, point: CrashPoint
) -> None:
    settings = settings.model_copy(update={"lease_s": 0.5})
    folder = tmp_path / "cluster"
    folder.mkdir()
    cluster = DurableCluster(folder)
    jobs = JobService(store, cluster, settings)
    name = "endless" if point in CANCELS else "short"
    job, _ = await jobs.submit({**JOB, "name": name})

    fatal = settings.model_copy(update={"crash_at": point.value})
    process = origin.fork(fatal, folder)
    if point in CANCELS:
        await until_state(jobs, job.id, State.RUNNING)
        await jobs.cancel(job.id)
    assert await asyncio.wait_for(process.wait(), DEADLINE_S) == -signal.SIGKILL

    async with reconciling(store, cluster, settings):
        ended = await until_released(jobs, job.id)

    assert ended.state is (State.CANCELLED if point in CANCELS else State.SUCCEEDED)
    assert cluster.started() == [job.id]
    assert await cluster.jobs_present() == set()
    assert set(await all_digests(jobs, job.id)) == set(range(1, STEPS + 1))
    events = (await jobs.history.events(job.id, limit=1000)).items
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    kinds = [event.kind for event in events]
    for once in ("job.submitted", "attempt.forming", "attempt.running", "ended", "job.released"):
        assert kinds.count(once) == 1, once
    states = [event.data["to"] for event in events if event.kind == "job.state"]
    assert len(states) == len(set(states))


@pytest.mark.parametrize("point", sorted(PAUSES))
async def test_a_crash_in_a_pause_loses_nothing_and_the_job_goes_on(
    origin: ReconcilerOrigin, settings: Settings, store: Store, tmp_path: Path, point: CrashPoint
) -> None:
    settings = settings.model_copy(update={"lease_s": 0.5})
    cluster, jobs, job, process = await endless_job(origin, settings, store, tmp_path, point)
    await jobs.pause(job.id)
    assert await asyncio.wait_for(process.wait(), DEADLINE_S) == -signal.SIGKILL

    async with reconciling(store, cluster, settings):
        await until_state(jobs, job.id, State.PAUSED)
        assert await cluster.jobs_present() == set()
        assert cluster.started() == [job.id]
        await jobs.resume(job.id)
        ended = await until_released(jobs, job.id)

    assert ended.state is State.SUCCEEDED
    assert cluster.started() == [job.id] * 2
    assert set(await all_digests(jobs, job.id)) == set(range(1, 2 * STEPS + 1))
    assert [attempt.number for attempt in (await jobs.history.attempts(job.id)).items] == [1, 2]
    events = (await jobs.history.events(job.id, limit=1000)).items
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    states = [event.data["to"] for event in events if event.kind == "job.state"]
    first, second = states[: states.index("PAUSED") + 1], states[states.index("PAUSED") + 1 :]
    assert first == ["STARTING", "RUNNING", "PAUSING", "PAUSED"]
    assert second == ["QUEUED", "STARTING", "RUNNING", "SUCCEEDED"]


@pytest.mark.parametrize("point", sorted(PAUSES - {CrashPoint.PAUSE_INTENDED}))
async def test_a_crash_in_a_restart_loses_nothing_and_the_job_goes_on_by_itself(
    origin: ReconcilerOrigin, settings: Settings, store: Store, tmp_path: Path, point: CrashPoint
) -> None:
    settings = settings.model_copy(update={"lease_s": 0.5})
    cluster, jobs, job, process = await endless_job(origin, settings, store, tmp_path, point)
    assert (await jobs.restart(job.id)).state is State.PAUSING
    assert (await jobs.restart(job.id)).generation == 2, "a repeated command changes nothing"
    assert await asyncio.wait_for(process.wait(), DEADLINE_S) == -signal.SIGKILL

    async with reconciling(store, cluster, settings):
        ended = await until_released(jobs, job.id)
    assert ended.state is State.SUCCEEDED
    assert cluster.started() == [job.id] * 2
    assert set(await all_digests(jobs, job.id)) == set(range(1, 2 * STEPS + 1))
    events = (await jobs.history.events(job.id, limit=1000)).items
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    states = [event.data["to"] for event in events if event.kind == "job.state"]
    run = ["STARTING", "RUNNING"]
    assert states == [*run, "PAUSING", "PAUSED", "QUEUED", *run, "SUCCEEDED"]


async def test_two_processes_on_one_database_start_every_job_once(
    origin: ReconcilerOrigin, settings: Settings, store: Store, tmp_path: Path
) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    cluster = DurableCluster(folder)
    jobs = JobService(store, cluster, settings)
    processes = [origin.fork(settings, folder) for _ in range(2)]
    try:
        ids = [(await jobs.submit({**JOB, "name": f"j{n}"}))[0].id for n in range(10)]

        async def over() -> bool:
            return all([(await jobs.get(job_id)).released for job_id in ids])

        await until(over, deadline_s=60)
    finally:
        for process in processes:
            process.kill()
            await process.wait()
    assert sorted(cluster.started()) == sorted(ids)
    for job_id in ids:
        assert len(await all_digests(jobs, job_id)) == STEPS


def test_a_process_that_does_not_answer_ends_the_wait_for_it() -> None:
    origin = ReconcilerOrigin(answer_s=0.0)  # it still imports
    try:
        with pytest.raises(TimeoutError, match="no answer to"):
            origin.ask({"wait": 0})
    finally:
        origin.end()
