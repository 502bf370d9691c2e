"""The holder of leases: it works on each row that it holds, and on no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import select, update
from tests.support.service.databases import paced
from tests.support.service.job_drives import until
from tests.support.service.leased_rows import add_rows, table

from holdfast_service.settings import Settings
from holdfast_service.store import leases
from holdfast_service.store.engine import Store
from holdfast_service.store.lease_holder import LeaseHolder
from holdfast_service.store.leases import RowLease
from holdfast_service.store.models import Leased, LeaseOwner

__all__ = ["table"]

LATER_S = 3600.0
Work = Callable[[RowLease], Awaitable[float]]


class Servers:
    """Holders of the three rows of a table, of which each works on two at a time."""

    def __init__(
        self, store: Store, settings: Settings, table: type[Leased], ids: list[str]
    ) -> None:
        self.store = store
        self.settings = paced(settings, claim_interval_s=0.05).model_copy(update={"lease_s": 0.6})
        self.table = table
        self.ids = ids

    @asynccontextmanager
    async def holder(self, work: Work, limit: int = 2) -> AsyncIterator[LeaseHolder]:
        async def perform(lease: RowLease) -> float:
            return await work(lease)

        holder = LeaseHolder(self.store, self.table, self.settings, limit, perform)
        keeping = asyncio.create_task(holder.keep(asyncio.Event()))
        try:
            yield holder
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await holder.leave(0.0)

    async def owner_of(self, row_id: str) -> str | None:
        async with self.store.read() as session:
            return (await session.get_one(self.table, row_id)).lease_owner


@pytest.fixture
async def servers(store: Store, settings: Settings, table: type[Leased]) -> Servers:
    return Servers(store, settings, table, await add_rows(store, settings, table, 3))


async def forever(_lease: RowLease) -> float:
    await asyncio.Event().wait()
    raise AssertionError


async def test_every_row_is_worked_on_within_the_limit_and_released(servers: Servers) -> None:
    done: list[str] = []
    most = 0

    async def work(lease: RowLease) -> float:
        nonlocal most
        most = max(most, len(holder.tasks))
        done.append(lease.id)
        await asyncio.sleep(0)
        return LATER_S if done.count(lease.id) == 2 else 0.0

    async with servers.holder(work) as holder:
        await until(lambda: len(done) == 6)
        await until(lambda: not holder.tasks)
        assert sorted(done) == sorted(servers.ids * 2) and most == 2
        assert [await servers.owner_of(row_id) for row_id in servers.ids] == [None] * 3


async def test_a_task_whose_lease_is_lost_is_cancelled(servers: Servers) -> None:
    async with servers.holder(forever, limit=3) as holder:
        await until(lambda: len(holder.tasks) == 3)
        lost, *kept = servers.ids
        async with servers.store.write() as session:
            another = LeaseOwner(id="other", until=2e10)
            session.add(another)
            stolen = {"lease_owner": another.id, "lease_token": "t"}
            await session.execute(
                update(servers.table).where(servers.table.id == lost).values(**stolen)
            )
            mine = LeaseOwner.id == holder.owner
            await session.execute(update(LeaseOwner).where(mine).values(until=0.0))
        await until(lambda: sorted(holder.tasks) == kept)


async def test_a_long_task_keeps_its_lease(servers: Servers) -> None:
    seen: set[float] = set()

    async def renewed() -> bool:
        async with servers.store.read() as session:
            seen.update(await session.scalars(select(LeaseOwner.until)))
        return len(seen) > 5

    async with servers.holder(forever) as holder:
        await until(lambda: len(holder.tasks) == 2)
        tasks = set(holder.tasks.values())
        await until(renewed)
        assert set(holder.tasks.values()) == tasks


async def test_a_row_is_worked_on_after_the_answer_to_its_claim_was_lost(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The COMMIT succeeded, but the connection broke before its answer."""
    claim, lost = leases.claim, list[RowLease]()

    async def lose_answer(*arguments: Any) -> list[RowLease]:
        taken = await claim(*arguments)
        if taken and not lost:
            lost.extend(taken)
            raise ConnectionError("the answer was lost")
        return taken

    monkeypatch.setattr(leases, "claim", lose_answer)
    async with servers.holder(forever, limit=3) as holder:
        await until(lambda: len(holder.tasks) == 3)
        assert lost


async def test_a_row_whose_task_failed_is_begun_again(servers: Servers) -> None:
    begun: list[str] = []

    async def work(lease: RowLease) -> float:
        begun.append(lease.id)
        if begun.count(lease.id) == 1:
            raise ConnectionError("the database does not answer")
        return LATER_S

    async with servers.holder(work):
        await until(lambda: all(begun.count(row_id) == 2 for row_id in servers.ids))


async def test_a_command_during_the_release_of_a_row_is_served_at_once(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    seldom = paced(servers.settings, claim_interval_s=LATER_S)
    servers.settings = seldom.model_copy(update={"lease_s": LATER_S})
    release, begun = leases.release, list[str]()

    async def commanded(
        store: Store, table: type[Leased], lease: RowLease, due_in_s: float
    ) -> bool:
        if begun.count(lease.id) == 1:
            async with store.write() as session:
                (await session.get_one(table, lease.id)).due_at = 0.0
            holder.wake()
        return await release(store, table, lease, due_in_s)

    async def work(lease: RowLease) -> float:
        begun.append(lease.id)
        return LATER_S

    monkeypatch.setattr(leases, "release", commanded)
    async with servers.holder(work, limit=3) as holder:
        await until(lambda: all(begun.count(row_id) == 2 for row_id in servers.ids))
