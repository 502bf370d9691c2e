"""Leases: a row has at most a single holder, and a former holder cannot write."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import select
from tests.support.service.job_drives import until
from tests.support.service.leased_rows import add_rows, table

from holdfast_service.settings import Settings
from holdfast_service.store import leases
from holdfast_service.store.engine import Store
from holdfast_service.store.leases import Lease, LeaseLost
from holdfast_service.store.models import JobRecord, Leased, LeaseOwner
from holdfast_service.store.transaction import job_transaction

__all__ = ["table"]


@pytest.fixture
async def rows(store: Store, settings: Settings, table: type[Leased]) -> Rows:
    return Rows(store, table, await add_rows(store, settings, table, 6))


class Rows:
    """Six rows, and what their holders do."""

    def __init__(self, store: Store, table: type[Leased], ids: list[str]) -> None:
        self.store = store
        self.table = table
        self.ids = ids

    async def claim(self, owner: str, limit: int, lease_s: float) -> list[Lease]:
        await self.renew(owner, [], lease_s)
        return await self.claim_unrenewed(owner, limit)

    async def claim_unrenewed(self, owner: str, limit: int) -> list[Lease]:
        return await leases.claim(self.store, self.table, owner, limit)

    async def renew(self, owner: str, ids: list[str], lease_s: float = 3600.0) -> set[str]:
        return await leases.renew(self.store, self.table, owner, ids, lease_s)

    async def release(self, lease: Lease, due_in_s: float) -> bool:
        return await leases.release(self.store, self.table, lease, due_in_s)

    async def idle(self, owner: str, busy: list[str]) -> set[Lease]:
        return await leases.idle(self.store, self.table, owner, busy)

    async def held_briefly(self) -> dict[str, Lease]:
        """The leases of owner `slow` on all rows, soon to expire: on a busy machine they may do so
        while they are claimed."""
        held: dict[str, Lease] = {}

        async def holds_all() -> bool:
            held.update({lease.id: lease for lease in await self.claim("slow", 10, 0.05)})
            return held.keys() == set(self.ids)

        await until(holds_all)
        return held


async def test_concurrent_claims_never_share_a_row(rows: Rows) -> None:
    taken = await asyncio.gather(*(rows.claim(f"o{n}", 2, 3600.0) for n in range(6)))
    claimed = [lease.id for batch in taken for lease in batch]
    assert len(claimed) == len(set(claimed))
    rest = await rows.claim("late", 10, 3600.0)
    assert sorted(claimed + [lease.id for lease in rest]) == sorted(rows.ids)
    assert await rows.claim("later", 10, 3600.0) == []


async def test_an_expired_holder_loses_every_write(rows: Rows) -> None:
    slow = await rows.held_briefly()
    found: list[Lease] = []

    async def taken_over() -> bool:
        found.extend(await rows.claim("next", 10, 3600.0))
        return len(found) == len(rows.ids)

    await until(taken_over)
    await write(rows, found[0])
    with pytest.raises(LeaseLost):
        await write(rows, slow[rows.ids[0]])
    assert await rows.renew("slow", rows.ids, 3600.0) == set()
    assert not await rows.release(slow[rows.ids[0]], 0.0)  # has no effect
    await write(rows, found[0])


async def test_a_renewed_lease_does_not_expire(rows: Rows) -> None:
    await rows.held_briefly()
    assert await rows.renew("slow", rows.ids, 3600.0) == set(rows.ids)
    await asyncio.sleep(0.2)  # the lease of the claim is over
    assert await rows.claim("other", 10, 1.0) == []


async def test_a_released_row_is_due_after_the_given_time(rows: Rows) -> None:
    for lease in await rows.claim("holder", 10, 3600.0):
        await rows.release(lease, 3600.0 if lease.id != rows.ids[3] else 0.0)
    again = await rows.claim("other", 10, 3600.0)
    assert [lease.id for lease in again] == [rows.ids[3]]


async def test_a_row_with_a_new_user_command_is_due_at_once_after_release(rows: Rows) -> None:
    held = await rows.claim("holder", 10, 3600.0)
    async with rows.store.write() as session:
        (await session.get_one(rows.table, rows.ids[2])).due_at = 0.0  # as a user command does
    commanded = [lease.id for lease in held if await rows.release(lease, 3600.0)]
    assert commanded == [rows.ids[2]]
    again = await rows.claim("other", 10, 3600.0)
    assert [lease.id for lease in again] == [rows.ids[2]]


async def test_an_expired_holder_learns_which_rows_it_still_holds(rows: Rows) -> None:
    await rows.held_briefly()
    await asyncio.sleep(0.1)
    assert await rows.claim_unrenewed("slow", 10) == []  # it has to renew first
    taken = {lease.id for lease in await rows.claim("next", 2, 3600.0)}
    assert len(taken) == 2
    assert await rows.renew("slow", rows.ids, 3600.0) == set(rows.ids) - taken
    assert await rows.claim("next", 10, 3600.0) == []


async def test_concurrent_claims_and_late_renewals_never_share_a_row(rows: Rows) -> None:
    for _ in range(5):
        await rows.claim("slow", 10, 0.02)
        await asyncio.sleep(0.05)
        kept, taken = await asyncio.gather(
            rows.renew("slow", rows.ids, 3600.0), rows.claim("next", 10, 3600.0)
        )
        assert kept | {lease.id for lease in taken} == set(rows.ids)
        assert not kept & {lease.id for lease in taken}
        await leases.leave(rows.store, "slow")
        for lease in taken:
            await rows.release(lease, 0.0)


async def test_rows_of_a_leaving_owner_are_claimable_at_once(rows: Rows) -> None:
    await rows.claim("gone", 10, 3600.0)
    await leases.leave(rows.store, "gone")
    assert len(await rows.claim("next", 10, 3600.0)) == len(rows.ids)
    async with rows.store.read() as session:
        assert list(await session.scalars(select(LeaseOwner.id))) == ["next"]


async def test_leases_held_without_work_are_found(rows: Rows) -> None:
    held = await rows.claim("holder", 10, 3600.0)
    assert await rows.idle("holder", rows.ids) == set()
    assert await rows.idle("holder", rows.ids[1:]) == {held[0]}
    await rows.release(held[0], 0.0)
    assert await rows.idle("holder", rows.ids[1:]) == set()


async def write(rows: Rows, lease: Lease) -> None:
    """Raises LeaseLost."""
    if rows.table is JobRecord:
        async with job_transaction(rows.store, lease.id, token=lease.token):
            return
    async with rows.store.write() as session:
        await leases.lock(session, rows.table, lease.id, lease.token)
