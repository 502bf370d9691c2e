"""SQLite as the store uses it: statements run where they are awaited, waiting is done in a thread.

The driver gives every statement to a thread of the connection. For the few rows that the store
reads and writes at a time, waking that thread costs several times the statement, and on a busy
machine milliseconds. So here a statement runs in the event loop's own thread, and never waits
there. The connection's thread has what may: for the disk (COMMIT), for a lock that somebody has
(the statement is then tried again), and all of a transaction of which `LONG` is said. Whoever
runs many short statements in a row lets others have the loop every few milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiosqlite
from sqlalchemy import URL, Connection, event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from holdfast_service.store.storable import to_json

WRITING = "holdfast_writing"
LONG = "holdfast_long"
"""Execution options: the transaction will write; one of its statements may take long."""
_LOOP_HELD_S = 0.003
"""Of statements in a row, before the loop has its turn."""


def engine_for(url: URL, busy_s: float, pool: int) -> AsyncEngine:
    """`busy_s`: longest wait for another's lock."""
    if url.database:
        Path(url.database).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    opens = partial(_File, url.database or ":memory:", timeout=0.0, check_same_thread=False)
    engine = create_async_engine(
        url,
        async_creator=partial(_Connection.open, opens, busy_s),
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
    """Its thread and the loop's never use the file at the same time.

    It is stopped once. The driver's own waits for ever for its thread to answer a second stop,
    which comes when a task is cancelled while its connection is being closed.
    """

    in_thread = True
    """Whether statements run there that need not."""
    began_at = 0.0
    """When the loop last had its turn (`time.perf_counter`)."""
    _stopped = False

    def __init__(self, opens: Callable[[], sqlite3.Connection], busy_s: float) -> None:
        super().__init__(opens, iter_chunk_size=64)
        self._busy_ms = round(busy_s * 1000)
        self._under_way: deque[None] = deque()  # in the thread, also of those who wait no more

    @classmethod
    async def open(cls, opens: Callable[[], sqlite3.Connection], busy_s: float) -> _Connection:
        connection = cls(opens, busy_s)
        connection._thread.daemon = True  # a process that ends waits for no statement
        await connection
        return connection

    def stop(self) -> asyncio.Future[Any] | None:
        if self._stopped:
            return None
        self._stopped = True
        return super().stop()

    async def commit(self) -> None:
        await self._wait(self._conn.commit)

    async def close(self) -> None:
        self.in_thread = True
        await super().close()

    async def _execute(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        function = partial(fn, *args, **kwargs)
        if self.in_thread or self._under_way or self._connection is None:
            return await self._wait(function)
        if time.perf_counter() - self.began_at > _LOOP_HELD_S:
            await asyncio.sleep(0)
            self.began_at = time.perf_counter()
        try:
            return function()
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY:
                raise
        return await self._wait(function)  # somebody has a lock, and here nobody may wait for it

    async def _wait(self, function: Callable[[], Any]) -> Any:
        if not self._running or self._connection is None:
            raise ValueError("Connection closed")
        ended = asyncio.get_running_loop().create_future()
        self._under_way.append(None)
        self._tx.put_nowait((ended, partial(self._patiently, function)))
        try:
            return await ended
        finally:
            self.began_at = time.perf_counter()

    def _patiently(self, function: Callable[[], Any]) -> Any:
        """In the thread."""
        try:
            self._conn.execute(f"PRAGMA busy_timeout={self._busy_ms}")
            return function()
        finally:
            with contextlib.suppress(sqlite3.Error, ValueError):  # it may be closed by now
                self._conn.execute("PRAGMA busy_timeout=0")
            self._under_way.pop()


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
    options = connection.get_execution_options()
    driver: Any = connection.connection.driver_connection
    driver.in_thread = bool(options.get(LONG, False))
    driver.began_at = time.perf_counter()
    writing = options.get(WRITING, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")
