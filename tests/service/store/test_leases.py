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
from holdfast_service.store.leases import LeaseLost, RowLease
from holdfast_service.store.models import JobRecord, Leased, LeaseOwner
from holdfast_service.store.transaction import job_transaction

__all__ = ["table"]


Rows = tuple[Store, type[Leased]]


@pytest.fixture
def rows(store: Store, table: type[Leased]) -> Rows:
    return store, table


@pytest.fixture
async def ids(store: Store, settings: Settings, table: type[Leased]) -> list[str]:
    return await add_rows(store, settings, table, 6)


async def claim(rows: Rows, owner: str, limit: int, lease_s: float) -> list[RowLease]:
    await leases.renew(*rows, owner, [], lease_s)
    return await leases.claim(*rows, owner, limit)


async def held_briefly(rows: Rows, ids: list[str]) -> dict[str, RowLease]:
    """The leases of owner `slow` on all rows, soon to expire: on a busy machine they may do so
    while they are claimed."""
    held: dict[str, RowLease] = {}

    async def holds_all() -> bool:
        held.update({lease.id: lease for lease in await claim(rows, "slow", 10, 0.05)})
        return held.keys() == set(ids)

    await until(holds_all)
    return held


async def test_concurrent_claims_never_share_a_row(rows: Rows, ids: list[str]) -> None:
    taken = await asyncio.gather(*(claim(rows, f"o{n}", 2, 3600.0) for n in range(6)))
    claimed = [lease.id for batch in taken for lease in batch]
    assert len(claimed) == len(set(claimed))
    rest = await claim(rows, "late", 10, 3600.0)
    assert sorted(claimed + [lease.id for lease in rest]) == sorted(ids)
    assert await claim(rows, "later", 10, 3600.0) == []


async def test_an_expired_holder_loses_every_write(rows: Rows, ids: list[str]) -> None:
    slow = await held_briefly(rows, ids)
    found: list[RowLease] = []

    async def taken_over() -> bool:
        found.extend(await claim(rows, "next", 10, 3600.0))
        return len(found) == len(ids)

    await until(taken_over)
    await write(rows, found[0])
    with pytest.raises(LeaseLost):
        await write(rows, slow[ids[0]])
    assert await leases.renew(*rows, "slow", ids, 3600.0) == set()
    assert not await leases.release(*rows, slow[ids[0]], 0.0)  # has no effect
    await write(rows, found[0])


async def test_a_renewed_lease_does_not_expire(rows: Rows, ids: list[str]) -> None:
    await held_briefly(rows, ids)
    assert await leases.renew(*rows, "slow", ids, 3600.0) == set(ids)
    await asyncio.sleep(0.2)  # the lease of the claim is over
    assert await claim(rows, "other", 10, 1.0) == []


async def test_a_released_row_is_due_after_the_given_time(rows: Rows, ids: list[str]) -> None:
    for lease in await claim(rows, "holder", 10, 3600.0):
        await leases.release(*rows, lease, 3600.0 if lease.id != ids[3] else 0.0)
    again = await claim(rows, "other", 10, 3600.0)
    assert [lease.id for lease in again] == [ids[3]]


async def test_a_row_with_a_new_user_command_is_due_at_once_after_release(
    rows: Rows, ids: list[str]
) -> None:
    held = await claim(rows, "holder", 10, 3600.0)
    async with rows[0].write() as session:
        (await session.get_one(rows[1], ids[2])).due_at = 0.0  # as a user command does
    commanded = [lease.id for lease in held if await leases.release(*rows, lease, 3600.0)]
    assert commanded == [ids[2]]
    again = await claim(rows, "other", 10, 3600.0)
    assert [lease.id for lease in again] == [ids[2]]


async def test_an_expired_holder_learns_which_rows_it_still_holds(
    rows: Rows, ids: list[str]
) -> None:
    await held_briefly(rows, ids)
    await asyncio.sleep(0.1)
    assert await leases.claim(*rows, "slow", 10) == []  # it has to renew first
    taken = {lease.id for lease in await claim(rows, "next", 2, 3600.0)}
    assert len(taken) == 2
    assert await leases.renew(*rows, "slow", ids, 3600.0) == set(ids) - taken
    assert await claim(rows, "next", 10, 3600.0) == []


async def test_concurrent_claims_and_late_renewals_never_share_a_row(
    rows: Rows, ids: list[str]
) -> None:
    for _ in range(5):
        await claim(rows, "slow", 10, 0.02)
        await asyncio.sleep(0.05)
        kept, taken = await asyncio.gather(
            leases.renew(*rows, "slow", ids, 3600.0), claim(rows, "next", 10, 3600.0)
        )
        assert kept | {lease.id for lease in taken} == set(ids)
        assert not kept & {lease.id for lease in taken}
        await leases.leave(rows[0], "slow")
        for lease in taken:
            await leases.release(*rows, lease, 0.0)


async def test_rows_of_a_leaving_owner_are_claimable_at_once(rows: Rows, ids: list[str]) -> None:
    await claim(rows, "gone", 10, 3600.0)
    await leases.leave(rows[0], "gone")
    assert len(await claim(rows, "next", 10, 3600.0)) == len(ids)
    async with rows[0].read() as session:
        assert list(await session.scalars(select(LeaseOwner.id))) == ["next"]


async def test_leases_held_without_work_are_found(rows: Rows, ids: list[str]) -> None:
    held = await claim(rows, "holder", 10, 3600.0)
    assert await leases.idle(*rows, "holder", ids) == set()
    assert await leases.idle(*rows, "holder", ids[1:]) == {held[0]}
    await leases.release(*rows, held[0], 0.0)
    assert await leases.idle(*rows, "holder", ids[1:]) == set()


async def write(rows: Rows, lease: RowLease) -> None:
    """Raises LeaseLost."""
    store, table = rows
    if table is JobRecord:
        async with job_transaction(store, lease.id, token=lease.token):
            return
    async with store.write() as session:
        await leases.lock(session, table, lease.id, lease.token)
