"""Databases and settings for tests of the control plane."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from uuid import uuid4

import asyncpg
from sqlalchemy import make_url

from holdfast_service.policy.pace import Pace
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store

T = TypeVar("T")
KEPT_DATABASES = 40
_made: dict[str, deque[str]] = {}
"""By the address of a server: the names of its databases, the oldest first."""


def run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in another thread; works for fixtures whose own thread runs a loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


@cache
def migrated_file() -> bytes:
    """An empty SQLite database with the schema: copying is cheaper than migrating."""
    with TemporaryDirectory() as folder:
        data_dir = Path(folder)
        run_in_thread(_migrate(fast_settings(data_dir)))
        return (data_dir / "holdfast.db").read_bytes()


async def migrated_database(server: Any) -> str:
    """Create a migrated PostgreSQL template for `new_database`; returns its name."""
    url = await _create(server, "template1")
    await _migrate(fast_settings(Path(), url))
    return str(make_url(url).database)


async def _migrate(settings: Settings) -> None:
    await (await Store.open(settings)).close()


async def new_database(server: Any, template: str = "template1") -> str:
    """Create a fresh database; returns its URL. It stays until there are KEPT_DATABASES newer ones:
    all of them are in memory."""
    url = await _create(server, template)
    made = _made.setdefault(server.get_uri(), deque())
    made.append(str(make_url(url).database))
    if len(made) > KEPT_DATABASES:
        await _execute(server, f"DROP DATABASE {made.popleft()} WITH (FORCE)")
    return url


async def _create(server: Any, template: str) -> str:
    name = f"holdfast_{uuid4().hex}"
    # A copy of the files is not written to the log of changes as well.
    await _execute(server, f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
    return str(server.get_uri(database=name))


async def _execute(server: Any, command: str) -> None:
    connection = await asyncpg.connect(server.get_uri())
    try:
        await connection.execute(command)
    finally:
        await connection.close()


QUICK = Pace(
    reconcile_interval_s=0.02,
    claim_interval_s=0.02,
    queue_retry_s=0.05,
    cluster_retry_s=0.05,
    error_retry_s=0.05,
    release_retry_s=0.02,
    supervisor_deadline_s=0.3,
    drain_deadline_s=5.0,
    reap_interval_s=0.1,
    node_look_s=0.05,
    database_busy_s=600.0,  # a lock that is never released outlasts every wait of a test
)


def fast_settings(data_dir: Path, database_url: str | None = None, **changed: Any) -> Settings:
    given = {"pace": QUICK, "lease_s": 5.0, **changed}
    return Settings(data_dir=data_dir, database_url=database_url, **given)


def paced(settings: Settings, **times: Any) -> Settings:
    """The same settings with other times of `Pace`."""
    return settings.model_copy(update={"pace": replace(settings.pace, **times)})
