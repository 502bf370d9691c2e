"""The share of waiting for data follows the last minute of steps, and begins anew in an attempt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.service.fake_cluster import FakeSupervisor, row
from tests.support.web.seed_events import started_job

from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.supervisor_protocol import Cursors, JobPlan
from holdfast_service.policy.quarantine import QuarantineRules
from holdfast_service.store.engine import Store
from holdfast_service.store.job_row_stats import HIGH_DATA_WAIT
from holdfast_service.store.models import JobRecord
from holdfast_service.store.projection import store_report
from holdfast_service.store.transaction import job_transaction


class TimedJob:
    """A job whose steps take 6 s."""

    def __init__(self, store: Store, job: str) -> None:
        self._store, self._job = store, job
        self._supervisor = FakeSupervisor(JobPlan(job, JobSpec(name="x")))
        self._supervisor.rows_per_poll = 1000

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


async def test_the_first_step_of_an_attempt_does_not_count(job: TimedJob) -> None:
    await job.train(1, 1, 50, waited_s=3.0)
    assert (await job.train(2, 50, 50, waited_s=6.0)).data_wait == 0.0
    assert (await job.train(2, 51, 51, waited_s=3.0)).data_wait > 0.0
