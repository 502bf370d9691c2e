"""Group commit for SQLite: several transactions share one COMMIT and one wait for the disk.

SQLite has one writer at a time. Writers queue here; the writers waiting when a transaction begins
join it, each except the first within its own savepoint, so a failing writer rolls back only its own
changes. No writer returns before the shared COMMIT has completed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession


class _Group:
    def __init__(self, connection: AsyncConnection) -> None:
        self.connection = connection
        self.stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stored.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


class GroupCommit:
    """The queue of writers to one database in this process."""

    def __init__(self, engine: AsyncEngine) -> None:
        """`engine`: an engine whose transactions begin with the right to write."""
        self._engine = engine
        self._order = asyncio.Lock()  # grants in request order
        self._group: _Group | None = None
        self._committing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """A transaction that is stored when the block has ended and rolled back when it raises. An
        exception propagates only after the earlier writes of the group, which the block may have
        read, are stored."""
        failed: Exception | None = None
        async with self._order:
            first = self._group is None
            group = self._group or await self._begin()
            try:
                async with (
                    _joined_session(group.connection, first=first) as session,
                    session.begin(),
                ):
                    yield session
            except BaseException as error:
                if first:
                    self._group = None
                    # A session without a statement does not roll back what it has joined, and the
                    # next group would wait for that.
                    await asyncio.shield(group.connection.rollback())
                if not isinstance(error, Exception):
                    raise
                failed = error
        if failed is None:
            await asyncio.shield(group.stored)
            return
        await asyncio.wait([group.stored])
        raise failed

    async def _begin(self) -> _Group:
        """Start a group. Writers that queue before its COMMIT join it; later ones form the next."""
        async with AsyncExitStack() as opened:
            connection = await opened.enter_async_context(self._engine.connect())
            await connection.begin()
            opened.pop_all()
        group = self._group = _Group(connection)
        task = asyncio.create_task(self._commit(group), name="commit")
        self._committing.add(task)
        task.add_done_callback(self._committing.discard)
        return group

    async def _commit(self, group: _Group) -> None:
        try:
            async with self._order:
                if self._group is group:
                    self._group = None
                if group.connection.in_transaction():
                    await group.connection.commit()
        except BaseException as error:
            group.stored.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            group.stored.set_result(None)
        finally:
            await group.connection.close()

    async def close(self) -> None:
        """Wait until pending commits are stored. Callers must not write after this call."""
        await asyncio.gather(*self._committing, return_exceptions=True)


def _joined_session(connection: AsyncConnection, *, first: bool) -> AsyncSession:
    """A session within the shared transaction. A rollback undoes only its own savepoint; for the
    `first` session it undoes the whole transaction."""
    return AsyncSession(
        connection,
        expire_on_commit=False,
        join_transaction_mode="rollback_only" if first else "create_savepoint",
    )
