"""Opens SQLite databases, begins their transactions, and finds where SQLite must not be used."""

from __future__ import annotations

import contextlib
import os
import re
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
MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs"),
        *("glusterfs", "orangefs", "ocfs2", "gfs2", "davfs"),
        *("fuse.sshfs", "fuse.s3fs", "fuse.glusterfs", "fuse.ceph", "fuse.juicefs", "fuse.rclone"),
        *("fuse.gcsfuse", "fuse.blobfuse", "fuse.mountpoint-s3", "fuse.goofys"),
    }
)
_ESCAPED = re.compile(r"\\([0-7]{3})")


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


def network_file_system(path: Path) -> str | None:
    """The type of the network file system that holds `path`, which need not exist; None: local.

    SQLite must not be used there: its locks may not hold, and its write-ahead log needs memory that
    all processes share.
    """
    try:
        mounts = MOUNTS.read_text(errors="replace")
    except OSError:  # not Linux's /proc: nothing is known
        return None
    found = type_at(path.resolve(), mounts)
    return found if found in _NETWORK else None


def type_at(path: Path, mounts: str) -> str | None:
    """The type of the file system at an absolute path, by the lines of `mountinfo`. Pure."""
    best: tuple[int, str] | None = None
    for line in mounts.splitlines():
        place, _, source = line.partition(" - ")
        fields = place.split(" ")
        if len(fields) < 5 or not source:
            continue
        point = Path(_ESCAPED.sub(lambda code: chr(int(code[1], 8)), fields[4]))
        if path.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            best = len(point.parts), source.split(" ")[0]  # a later mount hides an earlier one
    return None if best is None else best[1]
