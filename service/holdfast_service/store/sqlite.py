"""Opens SQLite databases, and begins their transactions."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from holdfast_service.store.json_safe import to_json

WRITING = "holdfast_writing"
"""Execution option: the transaction will write."""


class _File(sqlite3.Connection):
    """A connection that releases its locks when closed. SQLite itself keeps the transaction of a
    closed connection open while any reference to one of its cursors exists, for example in the
    traceback of a cancelled task."""

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # it may be closed already
            self.rollback()
        super().close()


def engine_for(url: URL, busy_s: float, pool: int) -> AsyncEngine:
    """The engine for the database file in `url`. `busy_s`: maximum wait for a lock."""
    if url.database:
        Path(url.database).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    engine = create_async_engine(
        url,
        # Without an isolation level the driver begins no transactions; `_begin` does.
        connect_args={"timeout": busy_s, "isolation_level": None, "factory": _File},
        pool_size=pool,
        max_overflow=0,
        pool_use_lifo=True,
        json_serializer=to_json,
    )
    event.listen(engine.sync_engine, "connect", _prepare)
    event.listen(engine.sync_engine, "begin", _begin)
    return engine


def _prepare(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    # A submitted job is on disk before the response is sent, so it survives a power failure.
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _begin(connection: Connection) -> None:
    """Begin a transaction. A deferred transaction that turns into a writer can fail because its
    snapshot is outdated; an immediate one waits for the write lock instead."""
    writing = connection.get_execution_options().get(WRITING, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")
