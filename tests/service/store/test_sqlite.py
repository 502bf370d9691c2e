"""The store on SQLite: what runs where, and who waits for whom."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.support.service.databases import fast_settings

from holdfast_service.store import sqlite_driver
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


async def threads_of(store: Store, *, long: bool) -> set[int]:
    """Where a statement of a read runs."""
    threads: set[int] = set()
    async with store.read(long=long) as session:
        connection = (await (await session.connection()).get_raw_connection()).driver_connection
        assert connection is not None
        connection.create_function("thread", 0, lambda: threads.add(threading.get_ident()))
        await session.execute(text("SELECT thread()"))
    return threads


async def test_only_what_is_said_to_be_long_runs_beside_the_loop(store: Store) -> None:
    assert await threads_of(store, long=False) == {threading.get_ident()}
    assert threading.get_ident() not in await threads_of(store, long=True)


async def test_nobody_waits_for_the_disk_in_the_loop(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    commit = sqlite_driver._File.commit

    def watched(file: sqlite_driver._File) -> None:
        threads.add(threading.get_ident())
        commit(file)

    monkeypatch.setattr(sqlite_driver._File, "commit", watched)
    async with store.write() as session:
        await session.execute(text("UPDATE jobs SET name = 'x'"))
    assert threads and threading.get_ident() not in threads


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
    assert turns > 3


async def test_rows_are_fetched_as_they_are_asked_for(store: Store) -> None:
    numbers = """
        WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 1000000000)
        SELECT x FROM n
    """
    async with store.read() as session:
        found = await session.stream_scalars(text(numbers), execution_options={"yield_per": 10})
        assert [await anext(found) for _ in range(25)] == list(range(1, 26))
        await found.close()


async def written(by: Store, name: str, order: list[str]) -> None:
    async with by.write() as session:
        await session.execute(text("UPDATE jobs SET name = 'x'"))
        order.append(name)


async def test_users_stand_before_those_who_are_behind_them(store: Store) -> None:
    order: list[str] = []
    behind = store.behind_users()
    waiting = [asyncio.create_task(written(behind, f"driver {n}", order)) for n in range(40)]
    await asyncio.sleep(0)
    await written(store, "user", order)
    await asyncio.gather(*waiting)
    assert order.index("user") <= 6  # as many as may have a transaction at a time
    assert len(order) == 41


async def test_what_somebody_asked_for_stands_before_what_nobody_did(store: Store) -> None:
    order: list[str] = []
    watching = store.behind_users(watching=True)
    waiting = [asyncio.create_task(written(watching, f"poll {n}", order)) for n in range(40)]
    await asyncio.sleep(0)
    await written(store.behind_users(), "order", order)
    await asyncio.gather(*waiting)
    assert order.index("order") <= 3  # as many as may watch at a time
    assert len(order) == 41
