"""Leases: one holder at a time, and no write of a holder that lost its job."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import select
from tests.support.service.fake_cluster import FakeCluster
from tests.support.service.job_drives import until

from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store import leases
from holdfast_service.store.engine import Store
from holdfast_service.store.models import LeaseOwner
from holdfast_service.store.transaction import LeaseLost, job_transaction


@pytest.fixture
async def ids(store: Store, settings: Settings) -> list[str]:
    jobs = JobService(store, FakeCluster(), settings)
    return [(await jobs.submit({"name": "x"}))[0].id for _ in range(6)]


async def test_claims_at_once_never_share_a_job(store: Store, ids: list[str]) -> None:
    taken = await asyncio.gather(*(leases.claim(store, f"o{n}", 2, 30.0) for n in range(6)))
    claimed = [lease.job_id for batch in taken for lease in batch]
    assert len(claimed) == len(set(claimed))
    rest = await leases.claim(store, "late", 10, 30.0)
    assert sorted(claimed + [lease.job_id for lease in rest]) == sorted(ids)
    assert await leases.claim(store, "later", 10, 30.0) == []


async def test_a_holder_that_is_late_loses_every_write(store: Store, ids: list[str]) -> None:
    slow = {lease.job_id: lease for lease in await leases.claim(store, "slow", 10, 0.05)}
    found: list[leases.Lease] = []

    async def taken_over() -> bool:
        found.extend(await leases.claim(store, "next", 10, 30.0))
        return len(found) == len(ids)

    await until(taken_over)
    with pytest.raises(LeaseLost):
        async with job_transaction(store, ids[0], token=slow[ids[0]].token):
            pass
    assert await leases.renew(store, "slow", ids, 30.0) == set()
    await leases.release(store, slow[ids[0]], 0.0)  # no harm
    async with job_transaction(store, ids[0], token=found[0].token) as tx:
        tx.emit("mine", {})


async def test_a_renewed_lease_does_not_run_out(store: Store, ids: list[str]) -> None:
    await leases.claim(store, "holder", 10, 0.3)
    for _ in range(6):
        await asyncio.sleep(0.1)
        assert await leases.renew(store, "holder", ids, 0.3) == set(ids)
    assert await leases.claim(store, "other", 10, 1.0) == []


async def test_a_job_given_back_rests_as_long_as_it_was_told(store: Store, ids: list[str]) -> None:
    for lease in await leases.claim(store, "holder", 10, 30.0):
        await leases.release(store, lease, 30.0 if lease.job_id != ids[3] else 0.0)
    again = await leases.claim(store, "other", 10, 30.0)
    assert [lease.job_id for lease in again] == [ids[3]]


async def test_a_job_that_a_user_wants_something_of_meanwhile_does_not_rest(
    store: Store, ids: list[str]
) -> None:
    held = await leases.claim(store, "holder", 10, 30.0)
    async with job_transaction(store, ids[2]) as tx:
        tx.job.due_at = 0.0  # as a call on the job does
    for lease in held:
        await leases.release(store, lease, 30.0)
    again = await leases.claim(store, "other", 10, 30.0)
    assert [lease.job_id for lease in again] == [ids[2]]


async def test_a_holder_that_was_late_hears_what_it_still_holds(
    store: Store, ids: list[str]
) -> None:
    await leases.claim(store, "slow", 10, 0.05)
    await asyncio.sleep(0.1)
    assert await leases.claim(store, "slow", 10, 0.05) == []  # it has to renew first
    taken = {lease.job_id for lease in await leases.claim(store, "next", 2, 30.0)}
    assert len(taken) == 2
    assert await leases.renew(store, "slow", ids, 30.0) == set(ids) - taken
    assert await leases.claim(store, "next", 10, 30.0) == []


async def test_claims_and_late_renewals_at_once_never_share_a_job(
    store: Store, ids: list[str]
) -> None:
    for _ in range(5):
        await leases.claim(store, "slow", 10, 0.02)
        await asyncio.sleep(0.05)
        kept, taken = await asyncio.gather(
            leases.renew(store, "slow", ids, 30.0), leases.claim(store, "next", 10, 30.0)
        )
        assert kept | {lease.job_id for lease in taken} == set(ids)
        assert not kept & {lease.job_id for lease in taken}
        await leases.leave(store, "slow")
        for lease in taken:
            await leases.release(store, lease, 0.0)


async def test_who_leaves_leaves_its_jobs_to_others_at_once(store: Store, ids: list[str]) -> None:
    await leases.claim(store, "gone", 10, 30.0)
    await leases.leave(store, "gone")
    assert len(await leases.claim(store, "next", 10, 30.0)) == len(ids)
    async with store.read() as session:
        assert list(await session.scalars(select(LeaseOwner.id))) == ["next"]


async def test_what_an_owner_holds_and_does_not_drive_is_found(
    store: Store, ids: list[str]
) -> None:
    held = await leases.claim(store, "holder", 10, 30.0)
    assert await leases.undriven(store, "holder", set(ids)) == set()
    assert await leases.undriven(store, "holder", set(ids[1:])) == {held[0]}
    await leases.release(store, held[0], 0.0)
    assert await leases.undriven(store, "holder", set(ids[1:])) == set()
