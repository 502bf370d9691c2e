"""Fixtures: settings with short times over a database with the schema, and the store on it.

A conftest.py imports them. SQLite is enough where statements and transactions are the same on both
kinds of database; the tests of the store, of leases and of the reconciler run on PostgreSQL too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
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

from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store

SQLITE = "sqlite"
__all__ = ["on_each_database", "postgres_template", "settings", "store"]


@pytest.fixture(scope="session")
def postgres_template(postgres_server: Any) -> str:
    return run_in_thread(migrated_database(postgres_server))


@pytest.fixture
async def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """On SQLite, unless a test names the kind: `parametrize("settings", [...], indirect=True)`."""
    return await _settings(getattr(request, "param", SQLITE), request, tmp_path)


@pytest.fixture(params=[SQLITE, pytest.param("postgresql", marks=pytest.mark.database)])
async def on_each_database(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """`settings` for a room whose tests run on each kind of database."""
    return await _settings(request.param, request, tmp_path)


@pytest.fixture
async def store(settings: Settings) -> AsyncIterator[Store]:
    opened = await Store.open(settings)
    yield opened
    await opened.close()


async def _settings(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    if kind == SQLITE:
        (tmp_path / "holdfast.db").write_bytes(migrated_file())
        return fast_settings(tmp_path)
    server = request.getfixturevalue("postgres_server")
    template = request.getfixturevalue("postgres_template")
    return fast_settings(tmp_path, await new_database(server, template))
