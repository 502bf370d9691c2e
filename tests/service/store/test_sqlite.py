"""The store on SQLite: the threads that statements run in, and the order of waiting writers."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.support.service.databases import fast_settings
from tests.support.waiting import DEADLINE_S

from holdfast_service.store import sqlite_driver
from holdfast_service.store.engine import Store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store.open(fast_settings(tmp_path))
    yield opened
    await opened.close()


async def test_a_writer_waiting_for_a_lock_does_not_block_the_loop(
    store: Store, tmp_path: Path
) -> None:
    other = sqlite3.connect(tmp_path / "holdfast.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    async def write() -> None:
        async with store.write() as session:
            await session.execute(text("UPDATE jobs SET name = 'x'"))

    writing = asyncio.create_task(write())
    for _ in range(1000):  # a blocked loop would never get through these
        await asyncio.sleep(0)
    assert not writing.done()
    other.execute("COMMIT")
    await asyncio.wait_for(writing, DEADLINE_S)
    other.close()


async def threads_of(store: Store, *, long: bool) -> set[int]:
    """The threads in which a statement of a read runs."""
    threads: set[int] = set()
    async with store.read(long=long) as session:
        connection = (await (await session.connection()).get_raw_connection()).driver_connection
        assert connection is not None
        connection.create_function("thread", 0, lambda: threads.add(threading.get_ident()))
        await session.execute(text("SELECT thread()"))
    return threads


async def test_only_long_reads_run_in_a_thread(store: Store) -> None:
    assert await threads_of(store, long=False) == {threading.get_ident()}
    assert threading.get_ident() not in await threads_of(store, long=True)


async def test_commits_do_not_run_in_the_loop_thread(
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


async def test_a_long_series_of_statements_yields_the_loop(store: Store) -> None:
    iterations = 0

    async def read() -> None:
        async with store.read() as session:
            for _ in range(300):
                await session.execute(text("SELECT 1"))

    reading = asyncio.create_task(read())
    while not reading.done():
        await asyncio.sleep(0)
        iterations += 1
    await reading
    assert iterations > 3


async def test_streamed_rows_are_fetched_on_demand(store: Store) -> None:
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


async def test_normal_writes_overtake_low_priority_writes(store: Store) -> None:
    order: list[str] = []
    low_priority = store.low_priority()
    waiting = [asyncio.create_task(written(low_priority, f"driver {n}", order)) for n in range(40)]
    await asyncio.sleep(0)
    await written(store, "user", order)
    await asyncio.gather(*waiting)
    assert order.index("user") <= 6  # the limit of concurrent transactions
    assert len(order) == 41


async def test_user_commands_overtake_polling_writes(store: Store) -> None:
    order: list[str] = []
    polling = store.low_priority(polling=True)
    waiting = [asyncio.create_task(written(polling, f"poll {n}", order)) for n in range(40)]
    await asyncio.sleep(0)
    await written(store.low_priority(), "order", order)
    await asyncio.gather(*waiting)
    assert order.index("order") <= 3  # the limit of concurrent polling transactions
    assert len(order) == 41
