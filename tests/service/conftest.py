"""Fixtures for service tests: stores on SQLite files and on a real PostgreSQL server, and jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.service.databases import (
    fast_settings,
    migrated_database,
    migrated_file,
    new_database,
    run_in_thread,
)
from tests.support.service.fake_cluster import FakeCluster
from tests.support.service.postgres import running_postgres

from holdfast_service.services.jobs import JobService
from holdfast_service.services.nodes import NodeService
from holdfast_service.services.overview import Overview
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Any]:
    """A server for all tests."""
    with running_postgres() as server:
        yield server


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


@pytest.fixture
def overview(store: Store, settings: Settings) -> Overview:
    return Overview(store, NodeService(store), settings)
