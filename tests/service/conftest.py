"""Fixtures for service tests: databases without a schema, and services over a store."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.service.databases import fast_settings, new_database
from tests.support.service.fake_cluster import FakeCluster
from tests.support.service.stores import postgres_template, settings, store

from holdfast_service.services.jobs import JobService
from holdfast_service.services.nodes import NodeService
from holdfast_service.services.overview import Overview
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store

__all__ = ["postgres_template", "settings", "store"]


@pytest.fixture(params=["sqlite", "postgresql"])
async def unmigrated_settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """`settings` for each kind of database, without a schema."""
    url = None
    if request.param == "postgresql":
        url = await new_database(request.getfixturevalue("postgres_server"))
    return fast_settings(tmp_path, url)


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def jobs(store: Store, cluster: FakeCluster, settings: Settings) -> JobService:
    return JobService(store, cluster, settings)


@pytest.fixture
def overview(store: Store, settings: Settings) -> Overview:
    return Overview(store, NodeService(store), settings)
