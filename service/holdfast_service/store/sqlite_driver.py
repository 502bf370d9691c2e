"""An asyncio SQLite driver for SQLAlchemy: statements run in the event loop's thread.

A statement over a few rows takes less time than waking another thread twice, on a busy machine much
less. It therefore runs directly in the loop; only blocking work does not: COMMIT, which waits for
the disk, runs in a thread, and a lock held by another process is polled. A long series of
statements yields the loop every few milliseconds. A transaction that scans many rows or fetches
megabytes declares this when it begins; all its statements then run in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from sqlalchemy import URL, pool
from sqlalchemy.dialects.sqlite.base import SQLiteExecutionContext
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.engine import AdaptedConnection

T = TypeVar("T")

_MIN_PAUSE_S = 0.001
_MAX_PAUSE_S = 0.02
"""Minimum and maximum pause between two attempts to get a lock held elsewhere."""
_MAX_LOOP_HELD_S = 0.005
"""Maximum time of consecutive statements before the connection yields the event loop."""


class _File(sqlite3.Connection):
    """A connection that releases its locks when closed. SQLite itself keeps the transaction of a
    closed connection open while any reference to one of its cursors exists, for example in the
    traceback of a cancelled task."""

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # it may be closed already
            self.rollback()
        super().close()


class Connection(AdaptedConnection):
    """A driver connection for SQLAlchemy. Two threads never use the file at the same time: the
    connection waits for work that a cancelled task left running in a thread."""

    __slots__ = (
        "_busy_s",
        "_commit_executor",
        "_loop_held_since",
        "_running",
        "_without_yielding",
        "in_threads",
    )

    in_threads: bool
    """Statements run in threads."""

    _connection: Any

    def __init__(self, path: str, busy_s: float, commits: Executor) -> None:
        """`busy_s`: maximum wait for a lock held elsewhere. `commits`: the executor for COMMITs."""
        self._connection = sqlite3.connect(
            path, timeout=0.0, isolation_level=None, check_same_thread=False, factory=_File
        )
        self._busy_s = busy_s
        self._commit_executor = commits
        self._running: asyncio.Future[Any] | None = None
        self.in_threads = False
        self._without_yielding = False
        self._loop_held_since = time.perf_counter()

    def begin_transaction(self, *, without_yielding: bool) -> None:
        """Start a transaction. `without_yielding`: the loop does not run other tasks between its
        statements, so the transaction cannot be cancelled there either."""
        self.in_threads = False
        self._without_yielding = without_yielding
        self._loop_held_since = time.perf_counter()

    # ---- called by SQLAlchemy, inside a greenlet if the call awaits

    @property
    def isolation_level(self) -> str | None:
        return None  # the engine's user begins each transaction and states its kind

    def create_function(self, *args: Any, **kwargs: Any) -> None:
        self._connection.create_function(*args, **kwargs)

    def cursor(self, server_side: bool = False) -> Cursor:
        return Cursor(self, server_side)

    def commit(self) -> None:
        try:
            self.run_async(lambda file: self._in_thread(file.commit, self._commit_executor))
        except sqlite3.Error:
            self.rollback()  # otherwise a retry could succeed unnoticed
            raise

    def rollback(self) -> None:
        self.in_threads = False  # a rollback is fast
        self.run_async(lambda file: self.run_when_unlocked(file.rollback))

    def close(self) -> None:
        self.run_async(lambda file: self.run_when_unlocked(file.close))

    def terminate(self) -> None:
        """Close without waiting; the connection closes after any running statement."""
        if self._running is not None and not self._running.done():
            self._running.add_done_callback(lambda _ended: self._connection.close())
        else:
            self._connection.close()

    # ---- for cursors

    async def run_when_unlocked(self, work: Callable[[], T]) -> T:
        """The result of `work`, retried until no other connection holds a lock that it needs."""
        if self._running is not None:
            await asyncio.wait([self._running])
        held_s = time.perf_counter() - self._loop_held_since
        if held_s > _MAX_LOOP_HELD_S and not self._without_yielding:
            await asyncio.sleep(0)
            self._loop_held_since = time.perf_counter()
        pause_s, deadline = _MIN_PAUSE_S, time.monotonic() + self._busy_s
        while True:
            try:
                return await self._in_thread(work, None) if self.in_threads else work()
            except sqlite3.OperationalError as error:
                if not _is_locked(error) or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def _in_thread(self, work: Callable[[], T], threads: Executor | None) -> T:
        ending = asyncio.get_running_loop().run_in_executor(threads, work)
        self._running = ending
        found = await asyncio.shield(ending)
        self._running = None
        self._loop_held_since = time.perf_counter()
        return found


class Cursor:
    """A cursor that fetches all rows with the statement, or on demand if it is `server_side`."""

    __slots__ = ("_adapted", "_cursor", "_rows", "arraysize", "server_side")

    def __init__(self, connection: Connection, server_side: bool) -> None:
        self._adapted = connection
        self._cursor: sqlite3.Cursor = connection.driver_connection.cursor()
        self._rows: deque[Any] = deque()
        self.server_side = server_side
        self.arraysize = 1

    @property
    def description(self) -> Any:
        return self._cursor.description

    @property
    def rowcount(self) -> int:
        return self._cursor.rowcount

    @property
    def lastrowid(self) -> int | None:
        return self._cursor.lastrowid

    def execute(self, statement: str, parameters: Any = ()) -> None:
        self._run(lambda: self._cursor.execute(statement, parameters))

    def executemany(self, statement: str, parameters: Sequence[Any]) -> None:
        self._run(lambda: self._cursor.executemany(statement, parameters))

    def _run(self, statement: Callable[[], sqlite3.Cursor]) -> None:
        def work() -> list[Any]:
            cursor = statement()
            return [] if cursor.description is None or self.server_side else cursor.fetchall()

        self._rows = deque(self._fetched(work))

    def _fetched(self, work: Callable[[], list[Any]]) -> list[Any]:
        return self._adapted.run_async(lambda _file: self._adapted.run_when_unlocked(work))

    def fetchone(self) -> Any:
        if self.server_side:
            return next(iter(self.fetchmany(1)), None)
        return self._rows.popleft() if self._rows else None

    def fetchmany(self, size: int | None = None) -> list[Any]:
        count = self.arraysize if size is None else size
        if self.server_side:
            return self._fetched(lambda: self._cursor.fetchmany(count))
        return [self._rows.popleft() for _ in range(min(count, len(self._rows)))]

    def fetchall(self) -> list[Any]:
        if self.server_side:
            return self._fetched(self._cursor.fetchall)
        rows, self._rows = list(self._rows), deque()
        return rows

    def __iter__(self) -> Iterator[Any]:
        while (row := self.fetchone()) is not None:
            yield row

    def close(self) -> None:
        self._cursor.close()

    async def _async_soft_close(self) -> None:
        """Called by SQLAlchemy once all rows are fetched; the driver's cursor needs no action."""


class _Context(SQLiteExecutionContext):
    def create_server_side_cursor(self) -> Any:
        return self._dbapi_connection.cursor(server_side=True)


class Dialect(SQLiteDialect_pysqlite):
    """`sqlite+holdfast`; connections come from the engine's `creator`."""

    driver = "holdfast"
    supports_statement_cache = True
    supports_server_side_cursors = True
    is_async = True
    has_terminate = True
    execution_ctx_cls = _Context

    @classmethod
    def get_pool_class(cls, url: URL) -> type[pool.Pool]:
        del url
        return pool.AsyncAdaptedQueuePool

    def do_terminate(self, dbapi_connection: Any) -> None:
        dbapi_connection.terminate()

    def get_driver_connection(self, connection: Any) -> Any:
        return connection.driver_connection


def _is_locked(error: sqlite3.OperationalError) -> bool:
    code = getattr(error, "sqlite_errorcode", 0)
    return bool(code & 0xFF == sqlite3.SQLITE_BUSY and code != sqlite3.SQLITE_BUSY_SNAPSHOT)
