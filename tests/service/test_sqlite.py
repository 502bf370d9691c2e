"""The store on SQLite: nobody waits in the event loop, and users stand before those behind them."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
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


async def test_what_is_said_to_be_long_runs_beside_the_loop(store: Store) -> None:
    threads: set[int] = set()
    async with store.read(long=True) as session, store.read() as short:
        for one in (session, short):
            raw = await (await one.connection()).get_raw_connection()
            file = raw.driver_connection
            assert file is not None
            await file.create_function("thread", 0, lambda: threads.add(threading.get_ident()))
        await session.execute(text("SELECT thread()"))
        assert threading.get_ident() not in threads
        threads.clear()
        await short.execute(text("SELECT thread()"))
        assert threads == {threading.get_ident()}


async def test_many_statements_in_a_row_let_others_have_the_loop(store: Store) -> None:
    turns = 0

    async def read() -> None:
        async with store.read() as session:
            for _ in range(300):
                await session.execute(text("SELECT 1"))

    reading = asyncio.create_task(read())
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    await reading
    assert turns > 5


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
