"""Databases as released versions left them, opened by this version."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.service.databases import fast_settings, new_database
from tests.support.service.postgres import running_postgres
from tests.support.upgrade.fixture import Written, copy_to_postgres, versions

from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Any]:
    with running_postgres() as server:
        yield server


@pytest.fixture(params=versions(), ids=lambda written: written.folder.name)
def written(request: pytest.FixtureRequest) -> Written:
    """What one released version wrote."""
    found: Written = request.param
    return found


@pytest.fixture
def data_dir(written: Written, tmp_path: Path) -> Path:
    """The data directory of that version, with its SQLite database."""
    written.install(tmp_path)
    return tmp_path


@pytest.fixture(params=["sqlite", "postgresql"])
async def settings(request: pytest.FixtureRequest, data_dir: Path) -> Settings:
    """Settings of a server on that data directory, and on its database or a copy of it."""
    url = None
    if request.param == "postgresql":
        url = await new_database(request.getfixturevalue("postgres_server"))
        await copy_to_postgres(data_dir, url)
    return fast_settings(data_dir, url)


@pytest.fixture
async def store(settings: Settings) -> AsyncIterator[Store]:
    """The database, brought to the present schema."""
    opened = await Store.open(settings)
    yield opened
    await opened.close()
