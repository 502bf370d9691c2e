"""How SQLite is opened: what its driver needs to be told, and two weaknesses of it mended."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiosqlite
from sqlalchemy import URL, Connection, event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from holdfast_service.store.storable import to_json

WRITING = "holdfast_writing"
"""Execution option: the transaction will write."""


def engine_for(url: URL, busy_s: float, pool: int) -> AsyncEngine:
    """`busy_s`: longest wait for another's lock."""
    if url.database:
        Path(url.database).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    opens = partial(_File, url.database or ":memory:", timeout=busy_s)
    engine = create_async_engine(
        url,
        async_creator=partial(_Connection.open, opens),
        pool_size=pool,
        max_overflow=10,
        json_serializer=to_json,
    )
    event.listen(engine.sync_engine, "connect", _prepare)
    event.listen(engine.sync_engine, "begin", _begin)
    return engine


class _File(sqlite3.Connection):
    """Holds no lock once it is closed. SQLite itself keeps a closed connection's transaction open
    for as long as anybody refers to a cursor of it, as the traceback of a cancelled task does."""

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # it may be closed already
            self.rollback()
        super().close()


class _Connection(aiosqlite.Connection):
    """Stopped once. The driver's own waits for ever for its thread to answer a second stop, which
    comes when a task is cancelled while its connection is being closed."""

    _stopped = False

    @classmethod
    async def open(cls, opens: Callable[[], sqlite3.Connection]) -> _Connection:
        connection = cls(opens, iter_chunk_size=64)
        connection._thread.daemon = True  # a process that ends waits for no statement
        await connection
        return connection

    def stop(self) -> asyncio.Future[Any] | None:
        if self._stopped:
            return None
        self._stopped = True
        return super().stop()


def _prepare(connection: Any, _record: Any) -> None:
    # The driver must not open transactions of its own: `_begin` says which kind it is.
    connection.isolation_level = None
    cursor = connection.cursor()
    # An accepted job is on disk when its submitter hears of it, also if the power goes.
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _begin(connection: Connection) -> None:
    """A deferred transaction that turns into a writer may find its snapshot outdated and fail; an
    immediate one waits for its turn instead."""
    writing = connection.get_execution_options().get(WRITING, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")
