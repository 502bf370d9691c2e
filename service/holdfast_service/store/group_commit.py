"""Several transactions, one COMMIT: what it waits for, the disk, it waits for once.

SQLite has one writer at a time. Here writers stand in line; those who stand there when one begins
are written together with it, each but the first within a savepoint of its own: one that fails takes
none of the others with it. Nobody hears that it is stored before the COMMIT of all has come back.
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
    """The line of those who write to one database in this process."""

    def __init__(self, engine: AsyncEngine) -> None:
        """`engine`: its transactions begin with the right to write."""
        self._engine = engine
        self._turn = asyncio.Lock()  # in the order in which it was asked for
        self._group: _Group | None = None
        self._committing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """Stored when the block has ended, rolled back when it raises: what it raises is heard once
        that is stored which it may have seen of those before it."""
        failed: Exception | None = None
        async with self._turn:
            first = self._group is None
            group = self._group or await self._begin()
            try:
                async with _within(group.connection, first=first) as session, session.begin():
                    yield session
            except BaseException as error:
                if first:
                    self._group = None  # nothing of it is left
                if not isinstance(error, Exception):
                    raise
                failed = error
        if failed is None:
            await asyncio.shield(group.stored)
            return
        await asyncio.wait([group.stored])
        raise failed

    async def _begin(self) -> _Group:
        """Whoever is in line by now comes before the COMMIT, and whoever comes later after it."""
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
            async with self._turn:
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
        """What has been written is stored; nobody writes any more."""
        await asyncio.gather(*self._committing, return_exceptions=True)


def _within(connection: AsyncConnection, *, first: bool) -> AsyncSession:
    """A session that writes with others: what it takes back is its own alone, in a savepoint; or,
    of the `first` one, all that there is."""
    return AsyncSession(
        connection,
        expire_on_commit=False,
        join_transaction_mode="rollback_only" if first else "create_savepoint",
    )
