"""Several writers of an SQLite database share a COMMIT."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.support.service.databases import fast_settings
from tests.support.waiting import DEADLINE_S

from holdfast_service.store import sqlite_driver
from holdfast_service.store.engine import Store

ADD = text("INSERT INTO code_packages (id, content, used_at) VALUES (:id, x'00', 0)")


class Refused(Exception):
    pass


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store.open(fast_settings(tmp_path))
    yield opened
    await opened.close()


async def write(store: Store, name: str, *, fails: bool = False) -> None:
    async with store.write() as session:
        await session.execute(ADD, {"id": name})
        await asyncio.sleep(0.01)  # the other writers queue
        if fails:
            raise Refused


async def stored(store: Store) -> list[str]:
    async with store.read() as session:
        return list(await session.scalars(text("SELECT id FROM code_packages ORDER BY id")))


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry per COMMIT."""
    done: list[None] = []
    commit = sqlite_driver._File.commit

    def counted(file: sqlite3.Connection) -> None:
        done.append(None)
        commit(file)

    monkeypatch.setattr(sqlite_driver._File, "commit", counted)
    return done


async def test_queued_writers_share_a_commit(store: Store, commits: list[None]) -> None:
    await asyncio.gather(*(write(store, f"{n}") for n in range(6)))
    assert await stored(store) == [f"{n}" for n in range(6)]
    assert len(commits) <= 2


@pytest.mark.parametrize("bad", [0, 2, 5])
async def test_a_failing_writer_does_not_affect_other_writers(store: Store, bad: int) -> None:
    ends = await asyncio.gather(
        *(write(store, f"{n}", fails=n == bad) for n in range(6)), return_exceptions=True
    )
    assert [isinstance(end, Refused) for end in ends] == [n == bad for n in range(6)]
    assert await stored(store) == [f"{n}" for n in range(6) if n != bad]


async def test_a_writer_that_fails_before_its_first_statement_blocks_no_other(store: Store) -> None:
    async def refused() -> None:
        async with store.write():
            await asyncio.sleep(0.01)  # the other writers queue
            raise Refused

    writers = (refused(), write(store, "a"), refused(), write(store, "b"))
    async with asyncio.timeout(DEADLINE_S):  # less than SQLite waits for a lock
        await asyncio.gather(*writers, return_exceptions=True)
    assert await stored(store) == ["a", "b"]


@pytest.mark.parametrize("gone", [0, 2, 5])
async def test_a_cancelled_writer_does_not_affect_other_writers(store: Store, gone: int) -> None:
    writing = [asyncio.create_task(write(store, f"{n}")) for n in range(6)]
    while True:
        await asyncio.sleep(0.001)
        if gone == 0 or writing[gone - 1].done():
            break
    writing[gone].cancel()
    await asyncio.wait(writing)
    others = {f"{n}" for n in range(6) if n != gone}
    assert others <= set(await stored(store))
    await write(store, "later")
    assert "later" in await stored(store)


async def test_a_failed_commit_fails_every_writer_of_the_group(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as now:
        now.setattr(sqlite_driver._File, "commit", full)
        ends = await asyncio.gather(
            *(write(store, f"{n}") for n in range(3)), return_exceptions=True
        )
    assert all(isinstance(end, Exception) for end in ends)
    assert await stored(store) == []
    await write(store, "later")
    assert await stored(store) == ["later"]


async def test_an_error_propagates_after_the_writes_it_may_have_seen_are_stored(
    store: Store,
) -> None:
    ends = await asyncio.gather(write(store, "same"), write(store, "same"), return_exceptions=True)
    assert sorted(end is None for end in ends) == [False, True]

    async def twice() -> list[str]:
        try:
            await write(store, "other")
        except Exception:
            return await stored(store)
        return []

    seen = await asyncio.gather(twice(), twice())
    assert ["other", "same"] in seen
