"""The store on SQLite: threads of statements, the order of waiting writers, where its file is."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.support.service.databases import fast_settings
from tests.support.waiting import DEADLINE_S

from holdfast_service.settings import Settings
from holdfast_service.store import sqlite, sqlite_driver
from holdfast_service.store.engine import Store, UnsupportedDatabase
from holdfast_service.store.sqlite import type_at

MOUNTS = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:21 / /proc rw - proc proc rw
30 22 0:50 / /home rw,relatime shared:7 master:2 - nfs4 server:/home rw,vers=4.2
31 30 0:51 / /home/with\040space rw - ext4 /dev/sdb1 rw
32 22 0:52 / /data rw - ext4 /dev/sdc1 rw
33 32 0:53 / /data rw - fuse.sshfs host: rw
"""


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


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/homework/db", "ext4"),
        ("/home/me/.holdfast/holdfast.db", "nfs4"),
        ("/home/with space/x", "ext4"),
        ("/data/x", "fuse.sshfs"),
    ],
)
def test_the_innermost_and_latest_mount_counts(path: str, kind: str) -> None:
    assert type_at(Path(path), MOUNTS) == kind


@pytest.mark.parametrize("lines", ["", "\n\n", "broken", "1 2 3 4 - ", "a b c d e - "])
def test_unreadable_lines_count_as_unknown(lines: str) -> None:
    assert not type_at(Path("/x"), lines)


async def test_sqlite_on_a_network_file_system_is_refused_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"22 1 8:1 / / rw - ext4 a rw\n30 22 0:5 / {tmp_path} rw - nfs4 s:/x rw\n")
    monkeypatch.setattr(sqlite, "MOUNTS", mounts)
    with pytest.raises(UnsupportedDatabase, match=r"nfs4.*PostgreSQL"):
        await Store.open(Settings(data_dir=tmp_path / "new"))
    assert not (tmp_path / "new").exists()


async def test_the_database_belongs_to_its_owner_only(tmp_path: Path) -> None:
    former = os.umask(0o022)
    try:
        (tmp_path / "holdfast.db").touch(0o644)  # of an earlier version
        store = await Store.open(Settings(data_dir=tmp_path))
        files = {entry.name: entry.stat().st_mode & 0o777 for entry in os.scandir(tmp_path)}
        await store.close()
    finally:
        os.umask(former)
    assert "holdfast.db-wal" in files
    assert set(files.values()) == {0o600}
