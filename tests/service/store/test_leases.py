"""Job leases: a job has at most a single holder, and a former holder cannot write."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import select
from tests.support.service.fake_cluster import FakeCluster
from tests.support.service.job_drives import until

from holdfast_service.job_model.events.codec import UnknownEvent
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


async def claim(store: Store, owner: str, limit: int, lease_s: float) -> list[leases.JobLease]:
    await leases.renew(store, owner, [], lease_s)
    return await leases.claim(store, owner, limit)


async def held_briefly(store: Store, ids: list[str]) -> dict[str, leases.JobLease]:
    """The leases of owner `slow` on all jobs, soon to expire: on a busy machine they may do so
    while they are claimed."""
    held: dict[str, leases.JobLease] = {}

    async def holds_all() -> bool:
        held.update({lease.job_id: lease for lease in await claim(store, "slow", 10, 0.05)})
        return held.keys() == set(ids)

    await until(holds_all)
    return held


async def test_concurrent_claims_never_share_a_job(store: Store, ids: list[str]) -> None:
    taken = await asyncio.gather(*(claim(store, f"o{n}", 2, 3600.0) for n in range(6)))
    claimed = [lease.job_id for batch in taken for lease in batch]
    assert len(claimed) == len(set(claimed))
    rest = await claim(store, "late", 10, 3600.0)
    assert sorted(claimed + [lease.job_id for lease in rest]) == sorted(ids)
    assert await claim(store, "later", 10, 3600.0) == []


async def test_an_expired_holder_loses_every_write(store: Store, ids: list[str]) -> None:
    slow = await held_briefly(store, ids)
    found: list[leases.JobLease] = []

    async def taken_over() -> bool:
        found.extend(await claim(store, "next", 10, 3600.0))
        return len(found) == len(ids)

    await until(taken_over)
    with pytest.raises(LeaseLost):
        async with job_transaction(store, ids[0], token=slow[ids[0]].token):
            pass
    assert await leases.renew(store, "slow", ids, 3600.0) == set()
    await leases.release(store, slow[ids[0]], 0.0)  # has no effect
    async with job_transaction(store, ids[0], token=found[0].token) as tx:
        tx.emit(UnknownEvent("mine", {}))


async def test_a_renewed_lease_does_not_expire(store: Store, ids: list[str]) -> None:
    await held_briefly(store, ids)
    assert await leases.renew(store, "slow", ids, 3600.0) == set(ids)
    await asyncio.sleep(0.2)  # the lease of the claim is over
    assert await claim(store, "other", 10, 1.0) == []


async def test_a_released_job_is_due_after_the_given_time(store: Store, ids: list[str]) -> None:
    for lease in await claim(store, "holder", 10, 3600.0):
        await leases.release(store, lease, 3600.0 if lease.job_id != ids[3] else 0.0)
    again = await claim(store, "other", 10, 3600.0)
    assert [lease.job_id for lease in again] == [ids[3]]


async def test_a_job_with_a_new_user_command_is_due_at_once_after_release(
    store: Store, ids: list[str]
) -> None:
    held = await claim(store, "holder", 10, 3600.0)
    async with job_transaction(store, ids[2]) as tx:
        tx.job.due_at = 0.0  # as a user command does
    for lease in held:
        await leases.release(store, lease, 3600.0)
    again = await claim(store, "other", 10, 3600.0)
    assert [lease.job_id for lease in again] == [ids[2]]


async def test_an_expired_holder_learns_which_jobs_it_still_holds(
    store: Store, ids: list[str]
) -> None:
    await held_briefly(store, ids)
    await asyncio.sleep(0.1)
    assert await leases.claim(store, "slow", 10) == []  # it has to renew first
    taken = {lease.job_id for lease in await claim(store, "next", 2, 3600.0)}
    assert len(taken) == 2
    assert await leases.renew(store, "slow", ids, 3600.0) == set(ids) - taken
    assert await claim(store, "next", 10, 3600.0) == []


async def test_concurrent_claims_and_late_renewals_never_share_a_job(
    store: Store, ids: list[str]
) -> None:
    for _ in range(5):
        await claim(store, "slow", 10, 0.02)
        await asyncio.sleep(0.05)
        kept, taken = await asyncio.gather(
            leases.renew(store, "slow", ids, 3600.0), claim(store, "next", 10, 3600.0)
        )
        assert kept | {lease.job_id for lease in taken} == set(ids)
        assert not kept & {lease.job_id for lease in taken}
        await leases.leave(store, "slow")
        for lease in taken:
            await leases.release(store, lease, 0.0)


async def test_jobs_of_a_leaving_owner_are_claimable_at_once(store: Store, ids: list[str]) -> None:
    await claim(store, "gone", 10, 3600.0)
    await leases.leave(store, "gone")
    assert len(await claim(store, "next", 10, 3600.0)) == len(ids)
    async with store.read() as session:
        assert list(await session.scalars(select(LeaseOwner.id))) == ["next"]


async def test_leases_held_but_not_driven_are_found(store: Store, ids: list[str]) -> None:
    held = await claim(store, "holder", 10, 3600.0)
    assert await leases.undriven(store, "holder", set(ids)) == set()
    assert await leases.undriven(store, "holder", set(ids[1:])) == {held[0]}
    await leases.release(store, held[0], 0.0)
    assert await leases.undriven(store, "holder", set(ids[1:])) == set()
