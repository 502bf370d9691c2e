"""The database engine: SQLite or PostgreSQL behind the same two kinds of transaction.

`read()` sees one snapshot. `write()` holds the right to write from its first statement, so values
read inside it cannot change before they are written (BEGIN IMMEDIATE on SQLite, row locks on
PostgreSQL). No transaction is ever held across I/O to another system.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from sqlalchemy import URL, literal_column, make_url, text
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
)
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.sql import ColumnElement

from holdfast_service.job_model.cluster_growth import GrowthPlan
from holdfast_service.job_model.events.incidents import IncidentRecord
from holdfast_service.settings import Settings
from holdfast_service.store import postgres, sqlite
from holdfast_service.store.change_numbers import RESET_FUTURE_NUMBERS
from holdfast_service.store.group_commit import GroupCommit
from holdfast_service.store.installation import ensure_id
from holdfast_service.store.latency_histogram import Distribution
from holdfast_service.store.migrate import exclusive, migrate
from holdfast_service.store.models import JobRecord
from holdfast_service.store.sqlite import network_file_system
from holdfast_service.store.watched_jobs import WatchedJobs

_DRIVERS = {
    "sqlite": "sqlite+holdfast",
    "postgresql": "postgresql+asyncpg",
    "postgres": "postgresql+asyncpg",
}


_MAX_COMMAND_TRANSACTIONS = 4
_MAX_POLL_TRANSACTIONS = 2
"""Concurrent low-priority transactions: `_MAX_COMMAND_TRANSACTIONS` for work that carries out user
commands, `_MAX_POLL_TRANSACTIONS` for work that stores polled reports."""


class UnsupportedDatabase(Exception):
    """The database URL names neither SQLite on a local disk nor PostgreSQL."""


class Store:
    """Access to the database. Created by :meth:`open`, which brings the schema up to date, or by
    :meth:`at`, which does not."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.transitions: Counter[tuple[str, str, str]] = Counter()
        """Job state transitions stored by this process: (from, to, outcome code) -> count."""
        self.checkpoints: defaultdict[tuple[str, str], Distribution] = defaultdict(Distribution)
        """Durations of the checkpoint operations stored by this process, by (tier, operation)."""
        self.reconcile_lag = Distribution()
        """Delay between the time a job was due and the time this process handled it."""
        self.growth = GrowthPlan()
        """What this process last asked the cluster's autoscaler for."""
        self.installation = ""
        """The id of the installation that the database belongs to; see installation.py."""
        self.sends_webhooks = False
        """Whether incidents and job ends are queued as webhook messages."""
        self.on_incident_closed: Callable[[str, IncidentRecord], None] = lambda job_id, incident: (
            None
        )
        """Called after the end of an incident is stored; must neither block nor raise."""
        self.watched_jobs = WatchedJobs()
        self.on_job_stored: list[Callable[[JobRecord], None]] = []
        """Called after a transaction of this process has changed a job; must neither block nor
        raise."""
        # By default each PostgreSQL statement sees a newer snapshot; SQLite keeps one anyway.
        snapshot = {"isolation_level": "REPEATABLE READ"} if self.postgres else {}
        self._reader = engine.execution_options(**snapshot)
        self._long_reader = engine.execution_options(**snapshot, **{sqlite.LONG: True})
        self._writer = engine.execution_options(**{sqlite.WRITING: True})
        # SQLite allows one writer at a time, and waiting writers poll the lock in no order: of
        # many, some would starve while they hold all connections. Here they queue without one.
        self._group_commit = None if self.postgres else GroupCommit(self._writer)
        self._commands = asyncio.Semaphore(_MAX_COMMAND_TRANSACTIONS)
        self._polling = asyncio.Semaphore(_MAX_POLL_TRANSACTIONS)
        self._gate: contextlib.AbstractAsyncContextManager[object] = contextlib.nullcontext()

    @classmethod
    def at(cls, settings: Settings) -> Store:
        """The store of these settings, as it is: for backups. Raises UnsupportedDatabase."""
        url = database_url(settings.resolved_database_url())
        if url.get_backend_name() == "sqlite":
            engine = sqlite.engine_for(url, settings.pace.database_busy_s, settings.database_pool)
        else:
            engine = postgres.engine_for(url, settings.database_pool)
        store = cls(engine)
        store.sends_webhooks = settings.webhook_url is not None
        return store

    @classmethod
    async def open(cls, settings: Settings) -> Store:
        """Connect, and bring the schema up to date (safe with several processes at once)."""
        store = cls.at(settings)
        try:
            with said_plainly():
                await migrate(store._writer)
            async with store.write() as session:
                store.installation = await ensure_id(session, store._engine.dialect)
                if store.postgres:
                    for statement in RESET_FUTURE_NUMBERS:
                        await session.execute(text(statement))
        except BaseException:
            await store.close()
            raise
        return store

    async def close(self) -> None:
        if self._group_commit is not None:
            await self._group_commit.close()
        await self._engine.dispose()

    async def ping(self) -> None:
        """Raise if the database does not answer."""
        async with self.read() as session:
            await session.execute(text("SELECT 1"))

    def low_priority(self, *, polling: bool = False) -> Store:
        """The same store for work that can wait. Few of its transactions run at a time, so a
        transaction of normal priority waits for at most those few. `polling`: work that no user
        requested; it never delays low-priority work that a user did request."""
        store = copy.copy(self)
        store._gate = self._polling if polling else self._commands
        return store

    @asynccontextmanager
    async def read(self, *, long: bool = False) -> AsyncIterator[AsyncSession]:
        """`long`: a statement may scan many rows or fetch megabytes."""
        engine = self._long_reader if long else self._reader
        async with self._gate, AsyncSession(engine, expire_on_commit=False) as session:
            yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """A transaction that commits when the block ends and rolls back when the block raises."""
        async with self._gate, self._write_session() as session:
            yield session

    @asynccontextmanager
    async def _write_session(self) -> AsyncIterator[AsyncSession]:
        if self._group_commit is not None:
            async with self._group_commit.transaction() as session:
                yield session
            return
        async with AsyncSession(self._writer, expire_on_commit=False) as session, session.begin():
            yield session

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that excludes other writers, for the whole schema. Raises
        UnsupportedDatabase."""
        async with contextlib.AsyncExitStack() as stack:
            with said_plainly():
                connection = await stack.enter_async_context(exclusive(self._writer))
            yield connection

    @property
    def postgres(self) -> bool:
        return self._engine.dialect.name == "postgresql"

    def clock(self) -> ColumnElement[float]:
        """The database's own time, in Unix seconds.

        Lease expiry uses only this clock: the clocks of the reconcilers' machines may differ.
        """
        if self.postgres:
            return literal_column("CAST(extract(epoch FROM clock_timestamp()) AS double precision)")
        return literal_column("((julianday('now') - 2440587.5) * 86400.0)")


@contextlib.contextmanager
def said_plainly() -> Iterator[None]:
    """The errors of a first connection as UnsupportedDatabase."""
    try:
        yield
    except (OSError, DBAPIError) as error:
        raise UnsupportedDatabase(f"cannot open the database: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    """The driver's own words, without the statement and links that SQLAlchemy adds."""
    driver = error.orig if isinstance(error, DBAPIError) else None
    return str((driver and driver.__cause__) or driver or error)


def is_refused(error: DBAPIError) -> bool:
    """Whether the database rejects the given values permanently, so that a retry is useless.

    The PostgreSQL driver has no exception class for this case: the SQLSTATE is of class 22, or the
    cause is a ValueError if the driver noticed it before sending anything.
    """
    if isinstance(error, DataError | IntegrityError):
        return True
    state = getattr(error.orig, "sqlstate", None) or ""
    cause = error.orig.__cause__ if error.orig is not None else None
    return state.startswith("22") or isinstance(cause, ValueError)


def database_url(given: str) -> URL:
    """The URL with the asynchronous driver of this store. Raises UnsupportedDatabase."""
    forms = "use sqlite:///<path> or postgresql://<user>@<host>/<database>"
    try:
        url = make_url(given)
    except (ArgumentError, ValueError) as error:  # for example, a port that is not a number
        raise UnsupportedDatabase(f"the database URL cannot be read: {forms}") from error
    driver = _DRIVERS.get(url.get_backend_name())
    if driver is None:
        shown = url.render_as_string(hide_password=True)
        raise UnsupportedDatabase(f"database URL {shown!r}: {forms}")
    if driver.startswith("sqlite") and url.database:
        kind = network_file_system(Path(url.database))
        if kind is not None:
            raise UnsupportedDatabase(
                f"the database {url.database} would be on a network file system ({kind}), where "
                "SQLite can lose jobs: use PostgreSQL (--database-url "
                "postgresql://<user>@<host>/<database>), or a file on a local disk (--database-url "
                "sqlite:////<path>)"
            )
    return url.set(drivername=driver)
