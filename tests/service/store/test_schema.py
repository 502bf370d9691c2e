"""The schema: migrations match the models, and any number of processes may start concurrently."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text

from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.migrate import UnknownSchema
from holdfast_service.store.models import Base

_OPEN = """
import asyncio, sys
from pathlib import Path
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
async def main():
    store = await Store.open(Settings(data_dir=Path(sys.argv[1]), database_url=sys.argv[2]))
    await store.ping()
    await store.close()
asyncio.run(main())
"""


async def test_migrations_match_the_models(store: Store) -> None:
    def differences(connection: Connection) -> list[Any]:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, Base.metadata))

    async with store.read() as session:
        connection = await session.connection()
        assert await connection.run_sync(differences) == []


@pytest.mark.slow
async def test_concurrently_started_processes_migrate_once(unmigrated_settings: Settings) -> None:
    command = [sys.executable, "-c", _OPEN, str(unmigrated_settings.data_dir)]
    url = unmigrated_settings.resolved_database_url()
    started = [
        await asyncio.create_subprocess_exec(*command, url, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    for process in started:
        _, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()


async def test_reopening_changes_nothing(unmigrated_settings: Settings) -> None:
    for _ in range(2):
        store = await Store.open(unmigrated_settings)
        await store.ping()
        await store.close()


@pytest.mark.parametrize(
    ("revision", "reason"),
    [("0018", "a pre-release"), ("9999", "a later version")],
)
async def test_a_database_of_another_version_is_refused_and_unchanged(
    settings: Settings, revision: str, reason: str
) -> None:
    store = await Store.open(settings)
    async with store.write() as session:
        await session.execute(
            text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision}
        )
    await store.close()
    for _ in range(2):  # a refusal releases the lock of the migration
        with pytest.raises(UnknownSchema) as refused:
            await Store.open(settings)
        message = str(refused.value)
        assert revision in message and reason in message and "empty database" in message
        assert "\n" not in message
