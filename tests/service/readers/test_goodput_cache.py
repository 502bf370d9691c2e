"""One account of a job's time for all who look at it at once."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.service.job_drives import JOB

from holdfast_service.readers import goodput_cache
from holdfast_service.readers.goodput_cache import KeptAccounts
from holdfast_service.services.jobs import JobService
from holdfast_service.store import accounts
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import find_job
from holdfast_service.store.transaction import job_transaction


async def test_whoever_looks_at_once_shares_an_account_and_a_new_event_makes_another(
    store: Store, jobs: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = await jobs.submit(JOB)
    made = []

    async def counted(*given: object) -> object:
        made.append(given)
        return await accounts.goodput(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(goodput_cache, "accounts", type("_", (), {"goodput": counted}))
    kept = KeptAccounts()

    async def look() -> object:
        async with store.read() as session:
            return await kept.of(session, await find_job(session, job.id))

    first, second = await asyncio.gather(look(), look())
    assert first is second
    assert len(made) == 1
    async with job_transaction(store, job.id) as tx:
        tx.emit("job.pausing", {})
    assert await look() is not first
    assert len(made) == 2
