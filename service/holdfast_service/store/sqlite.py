"""How SQLite is opened, and how its transactions begin."""

from __future__ import annotations

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
"""Execution options: the transaction will write; one of its statements may take long."""


def engine_for(url: URL, busy_s: float, pool: int) -> AsyncEngine:
    """`busy_s`: longest wait for another's lock."""
    if url.database:
        Path(url.database).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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


def _prepare(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    # An accepted job is on disk when its submitter hears of it, also if the power goes.
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _begin(connection: Connection) -> None:
    """A deferred transaction that turns into a writer may find its snapshot outdated and fail; an
    immediate one waits for its turn instead."""
    options = connection.get_execution_options()
    file: Any = connection.connection.dbapi_connection
    writing = bool(options.get(WRITING, False))
    # Others wait for whoever writes: it is not to wait for its turn in the loop meanwhile.
    file.begins(in_one_go=writing)
    cursor = file.cursor()
    cursor.execute("BEGIN IMMEDIATE" if writing else "BEGIN")
    cursor.close()
    file.beside = bool(options.get(LONG, False))
