"""The store on SQLite: who waits for whom."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.service.databases import fast_settings

from holdfast_service.store.engine import Store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store.open(fast_settings(tmp_path))
    yield opened
    await opened.close()


async def test_a_writer_waits_for_anothers_lock_beside_the_loop(
    store: Store, tmp_path: Path
) -> None:
    other = sqlite3.connect(tmp_path / "holdfast.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    async def write() -> None:
        async with store.write() as session:
            await session.execute(text("UPDATE jobs SET name = 'x'"))

    writing = asyncio.create_task(write())
    for _ in range(1000):  # a loop that waits for the lock takes no turns, for it has no end
        await asyncio.sleep(0)
    assert not writing.done()
    other.execute("COMMIT")
    await asyncio.wait_for(writing, 20)
    other.close()


async def test_users_stand_before_those_who_are_behind_them(store: Store) -> None:
    order: list[str] = []
    behind = store.behind_users()

    async def write(name: str, by: Store) -> None:
        async with by.write() as session:
            await session.execute(text("UPDATE jobs SET name = 'x'"))
            order.append(name)

    waiting = [asyncio.create_task(write(f"driver {n}", behind)) for n in range(40)]
    await asyncio.sleep(0)
    await write("user", store)
    await asyncio.gather(*waiting)
    assert order.index("user") < 5
    assert len(order) == 41
