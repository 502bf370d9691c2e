"""SQLite for SQLAlchemy's asyncio: statements in the event loop's thread, waiting beside it.

A statement of a few rows takes less time than waking another thread twice, on a busy machine much
less. So it runs where it is awaited, and what may wait does not: COMMIT, which waits for the disk,
runs in a thread; for a lock that another process has it is asked again and again. Whoever has many
statements lets others have the loop every few milliseconds. Who is about to look at many rows at
once, or to fetch megabytes, says so when it begins: then all runs in threads.
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

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.02
"""Between two tries to get a lock that somebody else has."""
_LOOP_HELD_S = 0.005
"""Of statements in a row, before the loop has its turn."""


class _File(sqlite3.Connection):
    """Holds no lock once it is closed. SQLite itself keeps a closed connection's transaction open
    for as long as anybody refers to a cursor of it, as the traceback of a cancelled task does."""

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # it may be closed already
            self.rollback()
        super().close()


class Connection(AdaptedConnection):
    """What SQLAlchemy takes for a connection of a driver. Its file is never used by two threads at
    the same time: what a cancelled task has left in one is waited for."""

    __slots__ = (
        "_busy_s",
        "_commits",
        "_in_one_go",
        "_loop_held_since",
        "_under_way",
        "beside",
    )

    beside: bool
    """Statements run in threads."""

    _connection: Any

    def __init__(self, path: str, busy_s: float, commits: Executor) -> None:
        """`busy_s`: longest wait for another's lock. `commits`: runs COMMITs."""
        self._connection = sqlite3.connect(
            path, timeout=0.0, isolation_level=None, check_same_thread=False, factory=_File
        )
        self._busy_s = busy_s
        self._commits = commits
        self._under_way: asyncio.Future[Any] | None = None
        self.beside = False
        self._in_one_go = False
        self._loop_held_since = time.perf_counter()

    def begins(self, *, in_one_go: bool) -> None:
        """A transaction. `in_one_go`: the loop has no turn between its statements, so that nobody
        is cancelled there either."""
        self.beside = False
        self._in_one_go = in_one_go
        self._loop_held_since = time.perf_counter()

    # ---- what SQLAlchemy calls, in a greenlet where something is awaited

    @property
    def isolation_level(self) -> str | None:
        return None  # transactions are begun by whoever uses the engine, and say of which kind

    def create_function(self, *args: Any, **kwargs: Any) -> None:
        self._connection.create_function(*args, **kwargs)

    def cursor(self, server_side: bool = False) -> Cursor:
        return Cursor(self, server_side)

    def commit(self) -> None:
        try:
            self.run_async(lambda file: self._in_thread(file.commit, self._commits))
        except sqlite3.Error:
            self.rollback()  # else it could be tried again, of which nobody is told
            raise

    def rollback(self) -> None:
        self.beside = False  # it takes no time
        self.run_async(lambda file: self.wait(file.rollback))

    def close(self) -> None:
        self.run_async(lambda file: self.wait(file.close))

    def terminate(self) -> None:
        """Close it, if need be later; wait for nothing."""
        if self._under_way is not None and not self._under_way.done():
            self._under_way.add_done_callback(lambda _ended: self._connection.close())
        else:
            self._connection.close()

    # ---- for cursors

    async def wait(self, work: Callable[[], T]) -> T:
        """What `work` returns, once nobody else has a lock that it needs."""
        if self._under_way is not None:
            await asyncio.wait([self._under_way])
        held_s = time.perf_counter() - self._loop_held_since
        if held_s > _LOOP_HELD_S and not self._in_one_go:
            await asyncio.sleep(0)
            self._loop_held_since = time.perf_counter()
        pause_s, deadline = _FIRST_PAUSE_S, time.monotonic() + self._busy_s
        while True:
            try:
                return await self._in_thread(work, None) if self.beside else work()
            except sqlite3.OperationalError as error:
                if not _is_locked(error) or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _in_thread(self, work: Callable[[], T], threads: Executor | None) -> T:
        ending = asyncio.get_running_loop().run_in_executor(threads, work)
        self._under_way = ending
        found = await asyncio.shield(ending)
        self._under_way = None
        self._loop_held_since = time.perf_counter()
        return found


class Cursor:
    """Rows are fetched with the statement, or, of a `server_side` one, as they are asked for."""

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
            there = statement()
            return [] if there.description is None or self.server_side else there.fetchall()

        self._rows = deque(self._fetched(work))

    def _fetched(self, work: Callable[[], list[Any]]) -> list[Any]:
        return self._adapted.run_async(lambda _file: self._adapted.wait(work))

    def fetchone(self) -> Any:
        if self.server_side:
            return next(iter(self.fetchmany(1)), None)
        return self._rows.popleft() if self._rows else None

    def fetchmany(self, size: int | None = None) -> list[Any]:
        wanted = self.arraysize if size is None else size
        if self.server_side:
            return self._fetched(lambda: self._cursor.fetchmany(wanted))
        return [self._rows.popleft() for _ in range(min(wanted, len(self._rows)))]

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
        """SQLAlchemy's word for: all rows are here, the driver's own cursor is needed no more."""


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
