"""One database, SQLite or PostgreSQL, behind the same two kinds of transaction.

`read()` sees one snapshot; `write()` holds the right to write from its first statement, so that
what is read in it cannot have changed when it is written (BEGIN IMMEDIATE on SQLite, row locks on
PostgreSQL). No transaction is ever held across I/O to elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import URL, event, literal_column, make_url, text
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    DisconnectionError,
    IntegrityError,
)
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.sql import ColumnElement

from holdfast_service.settings import Settings
from holdfast_service.store import sqlite
from holdfast_service.store.change_numbers import FORGET_THOSE_TO_COME
from holdfast_service.store.group_commit import GroupCommit
from holdfast_service.store.json_safe import to_json
from holdfast_service.store.latency_histogram import Distribution
from holdfast_service.store.migrate import migrate
from holdfast_service.store.request_priority import Serving

_DRIVERS = {
    "sqlite": "sqlite+holdfast",
    "postgresql": "postgresql+asyncpg",
    "postgres": "postgresql+asyncpg",
}


_PREPARED = 500
"""Statements that each connection to PostgreSQL remembers; there are fewer."""
_ORDERS = 4
_WATCHING = 2
"""Of those who work behind users: transactions at a time that bring about what users want, and that
store what jobs have to say."""
_USERS_FIRST_S = 0.05
"""So long a request may keep those waiting who watch; it takes less, nearly always."""


class UnsupportedDatabase(Exception):
    """The database URL names something that is neither SQLite nor PostgreSQL."""


class Store:
    """Made by :meth:`open`; the schema is up to date from then on."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.transitions: Counter[tuple[str, str, str]] = Counter()
        """Of jobs, stored by this process: how many of each (from, to, outcome's code)."""
        self.checkpoints: defaultdict[tuple[str, str], Distribution] = defaultdict(Distribution)
        """Stored by this process: how long each took, by tier and operation."""
        self.reconcile_lag = Distribution()
        """How late this process did what was due for a job."""
        self.tells = False
        """Whether a webhook is to be told of incidents and ends."""
        self.on_incident_closed: Callable[[str, Mapping[str, Any]], None] = lambda job_id, told: (
            None
        )
        """Called once the end of an incident is stored; must neither wait nor raise."""
        self.serving = Serving()
        """Whom this process answers, told by whoever takes requests."""
        # PostgreSQL's default shows each statement a newer state; SQLite has one snapshot anyway.
        snapshot = {"isolation_level": "REPEATABLE READ"} if self.postgres else {}
        self._reader = engine.execution_options(**snapshot)
        self._long_reader = engine.execution_options(**snapshot, **{sqlite.LONG: True})
        self._writer = engine.execution_options(**{sqlite.WRITING: True})
        # SQLite lets one write at a time, and those who wait for it poll in no order: of many, some
        # would starve, and hold all connections meanwhile. There they stand in line without one.
        self._line = None if self.postgres else GroupCommit(self._writer)
        self._orders = asyncio.Semaphore(_ORDERS)
        self._watching = _AfterUsers(self.serving)
        self._gate: contextlib.AbstractAsyncContextManager[object] = contextlib.nullcontext()

    @classmethod
    async def open(cls, settings: Settings) -> Store:
        """Connect, and bring the schema up to date (safe with several processes at once)."""
        url = database_url(settings.resolved_database_url())
        if url.get_backend_name() == "sqlite":
            engine = sqlite.engine_for(url, settings.database_busy_s, settings.database_pool)
        else:
            engine = create_async_engine(
                url,
                pool_size=settings.database_pool,
                max_overflow=0,
                pool_use_lifo=True,  # whoever was used last has most statements prepared
                connect_args={"prepared_statement_cache_size": _PREPARED},
                json_serializer=to_json,
            )
            event.listen(engine.sync_engine, "checkout", _refuse_closed)
        store = cls(engine)
        store.tells = settings.webhook_url is not None
        try:
            await migrate(store._writer)
            if store.postgres:
                async with store.write() as session:
                    await session.execute(text(FORGET_THOSE_TO_COME))
        except BaseException:
            await store.close()
            raise
        return store

    async def close(self) -> None:
        if self._line is not None:
            await self._line.close()
        await self._engine.dispose()

    async def ping(self) -> None:
        """Raise if the database does not answer."""
        async with self.read() as session:
            await session.execute(text("SELECT 1"))

    def behind_users(self, *, watching: bool = False) -> Store:
        """The same store for work that can wait: of all who use it so, few have a transaction at a
        time, and whoever uses it as it is stands in line behind those few at most. `watching`:
        nobody asked for this work; it keeps nothing waiting that somebody did ask for, and begins
        when no request is being answered, if that is soon."""
        store = copy.copy(self)
        store._gate = self._watching if watching else self._orders
        return store

    @asynccontextmanager
    async def read(self, *, long: bool = False) -> AsyncIterator[AsyncSession]:
        """`long`: one statement may look at many rows, or fetch megabytes."""
        engine = self._long_reader if long else self._reader
        async with self._gate, AsyncSession(engine, expire_on_commit=False) as session:
            yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """Committed when the block ends, rolled back when it raises."""
        async with self._gate, self._written() as session:
            yield session

    @asynccontextmanager
    async def _written(self) -> AsyncIterator[AsyncSession]:
        if self._line is not None:
            async with self._line.transaction() as session:
                yield session
            return
        async with AsyncSession(self._writer, expire_on_commit=False) as session, session.begin():
            yield session

    @property
    def postgres(self) -> bool:
        return self._engine.dialect.name == "postgresql"

    def clock(self) -> ColumnElement[float]:
        """The database's own time, in Unix seconds.

        Leases are judged by it alone: the clocks of the machines that run reconcilers may differ.
        """
        if self.postgres:
            return literal_column("CAST(extract(epoch FROM clock_timestamp()) AS double precision)")
        return literal_column("((julianday('now') - 2440587.5) * 86400.0)")


class _AfterUsers:
    """Lets _WATCHING at a time in, each when no user is being served."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._room = asyncio.Semaphore(_WATCHING)

    async def __aenter__(self) -> None:
        await self._room.acquire()
        try:
            await self._serving.quiet(_USERS_FIRST_S)
        except BaseException:
            self._room.release()
            raise

    async def __aexit__(self, *_raised: object) -> None:
        self._room.release()


def _refuse_closed(connection: Any, _record: Any, _proxy: Any) -> None:
    """Of a connection that the server has closed meanwhile another one is made. To ask the server
    each time, as the pool can do by itself, would cost three times what a statement costs."""
    if connection.driver_connection.is_closed():
        raise DisconnectionError("the server has closed it")


def is_refused(error: DBAPIError) -> bool:
    """Whether the database will not have what it was given, however often it is asked.

    Its driver for PostgreSQL has no class of its own for that: SQLSTATE's class 22 says it, or, if
    it was noticed before anything was sent, a ValueError.
    """
    if isinstance(error, DataError | IntegrityError):
        return True
    state = getattr(error.orig, "sqlstate", None) or ""
    cause = error.orig.__cause__ if error.orig is not None else None
    return state.startswith("22") or isinstance(cause, ValueError)


def database_url(given: str) -> URL:
    """The URL with the asynchronous driver that this store uses; raises UnsupportedDatabase."""
    forms = "use sqlite:///<path> or postgresql://<user>@<host>/<database>"
    try:
        url = make_url(given)
    except (ArgumentError, ValueError) as error:  # a port that is no number, for one
        raise UnsupportedDatabase(f"the database URL cannot be read: {forms}") from error
    driver = _DRIVERS.get(url.get_backend_name())
    if driver is None:
        shown = url.render_as_string(hide_password=True)
        raise UnsupportedDatabase(f"database URL {shown!r}: {forms}")
    return url.set(drivername=driver)
