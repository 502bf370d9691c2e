"""Opens SQLite databases, and begins their transactions."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, event
from sqlalchemy.dialects import registry
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from holdfast_service.store import sqlite_driver
from holdfast_service.store.json_safe import to_json

WRITING = "holdfast_writing"
LONG = "holdfast_long"
"""Execution options: WRITING, the transaction will write; LONG, a statement may take long."""


def engine_for(url: URL, busy_s: float, pool: int) -> AsyncEngine:
    """The engine for the database file in `url`. `busy_s`: maximum wait for a lock."""
    if url.database:
        _make_private(Path(url.database))
    registry.register("sqlite.holdfast", sqlite_driver.__name__, "Dialect")
    commits = ThreadPoolExecutor(1, thread_name_prefix="commit")  # SQLite has one writer at a time
    engine = create_async_engine(
        url.set(drivername="sqlite+holdfast"),
        creator=partial(sqlite_driver.Connection, url.database or ":memory:", busy_s, commits),
        pool_size=pool,
        max_overflow=0,
        pool_use_lifo=True,
        json_serializer=to_json,
    )
    event.listen(engine.sync_engine, "connect", _prepare)
    event.listen(engine.sync_engine, "begin", _begin)
    return engine


def _make_private(file: Path) -> None:
    """The database and its companions belong to its owner only; new companions inherit that."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    for path in (file, *(file.with_name(file.name + suffix) for suffix in ("-wal", "-shm"))):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # another user's database
            path.chmod(0o600)


def _prepare(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    # A submitted job is on disk before the response is sent, so it survives a power failure.
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _begin(connection: Connection) -> None:
    """Begin a transaction. A deferred transaction that turns into a writer can fail because its
    snapshot is outdated; an immediate one waits for the write lock instead."""
    options = connection.get_execution_options()
    file: Any = connection.connection.dbapi_connection
    writing = bool(options.get(WRITING, False))
    # Other writers wait for this transaction, so it does not yield the loop between statements.
    file.begin_transaction(without_yielding=writing)
    cursor = file.cursor()
    cursor.execute("BEGIN IMMEDIATE" if writing else "BEGIN")
    cursor.close()
    file.in_threads = bool(options.get(LONG, False))
