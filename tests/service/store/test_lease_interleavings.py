"""Leases under every interleaving: each statement and each commit waits for its turn.

Time is a number that the schedule advances, so that an owner can expire between any two statements
of its own transaction, and before its commit.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import delete, literal, select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import ColumnElement
from tests.support.service.databases import fast_settings, new_database
from tests.support.service.leased_rows import add_rows, table

from holdfast_service.store import leases
from holdfast_service.store.engine import Store
from holdfast_service.store.models import Leased, LeaseOwner

__all__ = ["table"]

T = TypeVar("T")

LEASE_S = 10.0
OWNERS = ("a", "b", "c")
ROWS = 4
SCHEDULES = 30
BLOCKED_S = 0.02
"""A step that takes longer is taken to wait for a lock; a wrong guess only changes the schedule."""
DEADLINE_S = 60.0


class _PausedSession:
    """A session whose every statement waits for its turn."""

    def __init__(self, session: AsyncSession, turn: Callable[[], Awaitable[None]]) -> None:
        self._session = session
        self._turn = turn

    async def execute(self, *statement: Any, **options: Any) -> Any:
        await self._turn()
        return await self._session.execute(*statement, **options)

    async def scalar(self, *statement: Any, **options: Any) -> Any:
        await self._turn()
        return await self._session.scalar(*statement, **options)

    async def scalars(self, *statement: Any, **options: Any) -> Any:
        await self._turn()
        return await self._session.scalars(*statement, **options)


class PausedStore(Store):
    """The view of one call on the store: it waits for a turn before each statement and before
    each commit; the time is `now[0]`."""

    def __init__(self, store: Store, now: list[float]) -> None:
        self.__dict__ |= store.__dict__
        self._now = now
        self._turn = asyncio.Event()
        self.waits = asyncio.Event()
        """Set while the call waits for its turn."""
        self.commits = False
        """Whether a write has nothing left but its commit."""

    def go(self) -> None:
        self.waits.clear()
        self._turn.set()

    def clock(self) -> ColumnElement[float]:
        return literal(self._now[0])

    @asynccontextmanager
    async def read(self, *, long: bool = False) -> AsyncIterator[Any]:
        async with super().read(long=long) as session:
            yield _PausedSession(session, self._wait)

    @asynccontextmanager
    async def write(self) -> AsyncIterator[Any]:
        async with super().write() as session:
            yield _PausedSession(session, self._wait)
            self.commits = True
            await self._wait()

    async def _wait(self) -> None:
        self.waits.set()
        await self._turn.wait()
        self._turn.clear()


class StartedCall:
    """A call of an owner, carried on step by step."""

    def __init__(self, owner: str, store: PausedStore, work: Coroutine[Any, Any, None]) -> None:
        self.owner = owner
        self._store = store
        self._task = asyncio.create_task(work)

    @property
    def done(self) -> bool:
        return self._task.done()

    @property
    def at_commit(self) -> bool:
        return self._store.commits

    async def step(self) -> None:
        """Carry on until the next turn, the end, or a lock."""
        if self._store.waits.is_set():
            self._store.go()
        waits = asyncio.create_task(self._store.waits.wait())
        await asyncio.wait(
            {waits, self._task}, timeout=BLOCKED_S, return_when=asyncio.FIRST_COMPLETED
        )
        waits.cancel()

    async def finish(self) -> None:
        end = asyncio.get_running_loop().time() + DEADLINE_S
        while not self.done:
            assert asyncio.get_running_loop().time() < end, f"{self.owner} waits for ever"
            await self.step()
        await self._task


class Owners:
    """Several owners with the rows of which each believes that it holds them."""

    def __init__(self, store: Store, table: type[Leased], ids: list[str]) -> None:
        self.store = store
        self.table = table
        self.ids = ids
        self.now = [1000.0]
        self.believed: defaultdict[str, dict[str, str]] = defaultdict(dict)

    def start(self, owner: str, name: str) -> StartedCall:
        view = PausedStore(self.store, self.now)
        work: dict[str, Callable[[str, PausedStore], Coroutine[Any, Any, None]]] = {
            "claim": self._claim,
            "renew": self._renew,
            "leave": self._leave,
        }
        return StartedCall(owner, view, work[name](owner, view))

    async def _claim(self, owner: str, view: PausedStore) -> None:
        for lease in await _retried(lambda: leases.claim(view, self.table, owner, 3)):
            self.believed[owner][lease.id] = lease.token

    async def _renew(self, owner: str, view: PausedStore) -> None:
        asked = dict(self.believed[owner])
        kept = await _retried(lambda: leases.renew(view, self.table, owner, asked, LEASE_S))
        for row_id in asked.keys() - kept:
            self.believed[owner].pop(row_id, None)

    async def _leave(self, owner: str, view: PausedStore) -> None:
        await _retried(lambda: leases.leave(view, owner))
        self.believed[owner].clear()


async def _retried(work: Callable[[], Awaitable[T]]) -> T:
    """A statement that the database refuses, for example for a deadlock, is tried again."""
    for _ in range(3):
        try:
            return await work()
        except DBAPIError:
            continue
    return await work()


@pytest.fixture
async def store(
    postgres_server: Any, postgres_template: str, tmp_path: Path
) -> AsyncIterator[Store]:
    """PostgreSQL only: SQLite has one writer at a time, so its transactions do not interleave."""
    url = await new_database(postgres_server, postgres_template)
    opened = await Store.open(fast_settings(tmp_path, url))
    yield opened
    await opened.close()


@pytest.fixture
async def world(store: Store, table: type[Leased], tmp_path: Path) -> Owners:
    return Owners(store, table, await add_rows(store, fast_settings(tmp_path), table, ROWS))


async def test_a_claim_that_commits_after_its_owner_was_forgotten_leaves_a_claimable_row(
    world: Owners,
) -> None:
    await world.start("a", "renew").finish()
    slow = world.start("a", "claim")
    while not slow.at_commit:
        await slow.step()
    world.now[0] += 2 * LEASE_S
    await world.start("b", "renew").finish()
    await world.start("b", "claim").finish()  # finds that the promise of `a` ran out
    await slow.finish()
    world.now[0] += 2 * LEASE_S
    assert await _claimed_by_a_new_owner(world) == set(world.ids)


async def test_a_row_whose_owner_is_not_among_the_living_is_free(world: Owners) -> None:
    async with world.store.write() as session:
        await session.execute(update(world.table).values(lease_owner="gone", lease_token="t"))
    await leases.renew(world.store, world.table, "new", [], LEASE_S)
    claimed = await leases.claim(world.store, world.table, "new", 10)
    assert {lease.id for lease in claimed} == set(world.ids)


@pytest.mark.seconds
async def test_every_interleaving_of_claims_renewals_and_leavings_keeps_the_leases(
    store: Store, table: type[Leased], world: Owners
) -> None:
    for seed in range(SCHEDULES):
        rng = random.Random(seed)
        world = Owners(store, table, world.ids)
        await _reset(world)
        running: list[StartedCall] = []
        for _ in range(rng.randint(20, 60)):
            running = [call for call in running if not call.done]
            idle = [o for o in OWNERS if all(call.owner != o for call in running)]
            choice = rng.random()
            if idle and choice < 0.35:
                name = rng.choices(("claim", "renew", "leave"), (5, 3, 1))[0]
                running.append(world.start(rng.choice(idle), name))
            elif running and choice < 0.9:
                await rng.choice(running).step()
            else:
                world.now[0] += rng.choice((1.0, LEASE_S / 2, 1.5 * LEASE_S))
        await asyncio.gather(*(call.finish() for call in running))
        await _check(world, f"seed {seed}")


async def _check(world: Owners, what: str) -> None:
    """At most one owner believes that it holds a row, and no row is lost."""
    rows = await _leases(world)
    owners: dict[str, str] = {}
    for owner in OWNERS:
        await world.start(owner, "renew").finish()
        for row_id, token in world.believed[owner].items():
            assert row_id not in owners, f"{what}: {owner} and {owners[row_id]} both hold {row_id}"
            assert rows[row_id] == (owner, token), f"{what}: {owner} does not hold {row_id}"
            owners[row_id] = owner
    world.now[0] += 3 * LEASE_S
    assert await _claimed_by_a_new_owner(world) == set(world.ids), f"{what}: a row is lost"


async def _claimed_by_a_new_owner(world: Owners) -> set[str]:
    await world.start("new", "renew").finish()
    for _ in world.ids:  # a claim takes three
        await world.start("new", "claim").finish()
    return set(world.believed.pop("new"))


async def _leases(world: Owners) -> dict[str, tuple[str | None, str | None]]:
    table = world.table
    columns = select(table.id, table.lease_owner, table.lease_token)
    async with world.store.read() as session:
        return {row_id: (owner, token) for row_id, owner, token in await session.execute(columns)}


async def _reset(world: Owners) -> None:
    values: dict[str, Any] = {"lease_owner": None, "lease_token": None, "due_at": 0.0}
    async with world.store.write() as session:
        await session.execute(delete(LeaseOwner))
        await session.execute(update(world.table).values(**values))
