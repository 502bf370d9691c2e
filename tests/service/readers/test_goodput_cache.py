"""Concurrent readers of a job share a goodput account."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.service.job_drives import JOB

from holdfast_service.job_model.events.codec import UnknownEvent
from holdfast_service.readers import goodput_cache
from holdfast_service.readers.goodput_cache import GoodputCache
from holdfast_service.services.jobs import JobService
from holdfast_service.store import accounts
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import find_job
from holdfast_service.store.transaction import job_transaction


async def test_concurrent_readers_share_an_account_until_a_new_event(
    store: Store, jobs: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = await jobs.submit(JOB)
    computed = []

    async def counted(*given: object) -> object:
        computed.append(given)
        return await accounts.goodput(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(goodput_cache, "accounts", type("_", (), {"goodput": counted}))
    cache = GoodputCache()

    async def read() -> object:
        async with store.read() as session:
            return await cache.get(session, await find_job(session, job.id))

    first, second = await asyncio.gather(read(), read())
    assert first is second
    assert len(computed) == 1
    async with job_transaction(store, job.id) as tx:
        tx.emit(UnknownEvent("job.pausing", {}))
    assert await read() is not first
    assert len(computed) == 2
