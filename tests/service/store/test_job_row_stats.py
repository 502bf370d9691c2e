"""The share of waiting for data follows the last minute of steps, and begins anew in an attempt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.service.fake_cluster import FakeSupervisor, row
from tests.support.web.seed_events import started_job

from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.lifecycle import Phase, State
from holdfast_service.job_model.supervisor_protocol import Cursors, JobPlan
from holdfast_service.policy.quarantine import QuarantineRules
from holdfast_service.readers.fleet_metrics import FleetReader
from holdfast_service.services.overview import Overview
from holdfast_service.store.engine import Store
from holdfast_service.store.job_row_stats import HIGH_DATA_WAIT
from holdfast_service.store.models import JobRecord
from holdfast_service.store.projection import store_report
from holdfast_service.store.transaction import job_transaction
from holdfast_workers.protocol.messages import Beat


class TimedJob:
    """A job whose steps take 6 s."""

    def __init__(self, store: Store, job: str) -> None:
        self._store, self._job = store, job
        self._supervisor = FakeSupervisor(JobPlan(job, JobSpec(name="x")))
        self._supervisor.rows_per_poll = 1000
        self._supervisor.phase = Phase.RUNNING

    async def report(
        self,
        *late: tuple[int, float],
        phase: Phase = Phase.RUNNING,
        attempt: int = 1,
        name: str = "data",
    ) -> JobRecord:
        """Store a report without steps; `late`: ranks in the phase `name`, and for how long."""
        self._supervisor.phase, self._supervisor.attempt = phase, attempt
        self._supervisor.beats = [
            Beat(rank, "w", 1, attempt, 2, name, 0, age_s, 600.0) for rank, age_s in late
        ]
        return await self._store_report()

    async def train(
        self, attempt: int, first: int, last: int, waited_s: float, fetched_s: float = 0.0
    ) -> JobRecord:
        """Store steps in which ranks waited for data, and return the job."""
        times: dict[str, Any] = {
            "step_time_s": 6.0,
            "loader_wait_s": waited_s,
            "fetch_wait_s": fetched_s,
        }
        for step in range(first, last + 1):
            self._supervisor.rows.append(replace(row(attempt, step), **times))
        self._supervisor.attempt = attempt
        return await self._store_report()

    async def _store_report(self) -> JobRecord:
        async with job_transaction(self._store, self._job, now=5000.0) as tx:
            report = self._supervisor.report(Cursors())
            await store_report(tx, report, QuarantineRules(), hold_end=False)
        async with self._store.read() as session:
            return await session.get_one(JobRecord, self._job)


@pytest.fixture
async def job(store: Store) -> TimedJob:
    return TimedJob(store, await started_job(store, JobSpec(name="x"), 1.0, 2.0))


async def test_waits_that_last_are_seen_and_forgotten_when_they_are_over(job: TimedJob) -> None:
    quick = await job.train(1, 1, 50, waited_s=0.0)
    assert quick.data_wait == quick.fetch_wait == 0.0
    one_slow = await job.train(1, 51, 51, waited_s=3.0)
    assert 0 < one_slow.data_wait < HIGH_DATA_WAIT
    slow = await job.train(1, 52, 101, waited_s=3.0, fetched_s=1.5)
    assert slow.data_wait == pytest.approx(0.5, abs=0.01)
    assert slow.fetch_wait == pytest.approx(0.25, abs=0.01)
    over = await job.train(1, 102, 151, waited_s=0.0)
    assert over.data_wait < HIGH_DATA_WAIT / 10


async def test_it_is_the_same_however_many_steps_a_report_brings(
    store: Store, job: TimedJob
) -> None:
    at_once = await job.train(1, 1, 40, waited_s=3.0)
    other = TimedJob(store, await started_job(store, JobSpec(name="y"), 1.0, 2.0))
    for step in range(1, 41):
        singly = await other.train(1, step, step, waited_s=3.0)
    assert singly.data_wait == pytest.approx(at_once.data_wait)


async def test_the_steps_of_a_job_that_does_not_train_do_not_count(
    store: Store, overview: Overview, job: TimedJob
) -> None:
    slow = await job.train(1, 1, 50, waited_s=3.0)
    assert "decoded" in (await overview.verdict(slow.id)).doing  # it has no sources
    assert (await FleetReader(store).statistics(5000.0)).data_bound_jobs == 1
    assert (await job.report(phase=Phase.RECOVERING)).state == State.RECOVERING
    assert (await FleetReader(store).statistics(5000.0)).data_bound_jobs == 0
    again = await job.report(phase=Phase.RUNNING, attempt=2)
    assert again.state == State.RUNNING
    assert (await FleetReader(store).statistics(5000.0)).data_bound_jobs == 0
    assert (await overview.verdict(again.id)).headline == "Training"


async def test_a_job_that_stands_for_want_of_data_waits_for_it(store: Store, job: TimedJob) -> None:
    async def bound() -> int:
        return (await FleetReader(store).statistics(5000.0)).data_bound_jobs

    await job.train(1, 1, 5, waited_s=0.0)
    assert (await job.report((1, 9.0))).waiting is None  # a step's row may say so soon
    assert (await job.report((1, 45.0), name="forward")).waiting is None and await bound() == 0
    stands = await job.report((0, 1.0), (1, 45.0))
    wait = {"resource": "data", "reason": "rank 1 waits for data", "since": 4955.0, "until": None}
    assert stands.waiting == wait and await bound() == 1
    assert (await job.report((1, 46.0))).waiting == wait  # is not stored anew
    more = await job.report((1, 50.0), (3, 49.0), (2, 48.0))
    assert more.waiting is not None
    assert more.waiting["reason"] == "rank 1 and 2 other ranks wait for data"
    assert (await job.report((1, 0.0))).waiting is None and await bound() == 0
    assert (await job.report((1, 45.0), phase=Phase.RECOVERING)).waiting is None


async def test_the_first_step_of_an_attempt_does_not_count(job: TimedJob) -> None:
    await job.train(1, 1, 50, waited_s=3.0)
    assert (await job.train(2, 50, 50, waited_s=6.0)).data_wait == 0.0
    assert (await job.train(2, 51, 51, waited_s=3.0)).data_wait > 0.0
