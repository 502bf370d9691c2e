"""Migrates the database schema at start; safe when several processes start at once.

The revisions are in `migrations/` and ship in the wheel. Tables are created only by migrations.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncEngine

_MIGRATIONS = Path(__file__).parent / "migrations"
_ADVISORY_LOCK = 0x486F6C64  # "Hold": one migration at a time in a PostgreSQL database


async def migrate(writer: AsyncEngine) -> None:
    """Run every revision that is missing, in one transaction that excludes other writers."""
    if writer.dialect.name == "sqlite":
        # In WAL mode readers and the writer do not block each other; the file keeps the setting.
        async with writer.connect() as connection:
            await connection.run_sync(_write_ahead)
    async with writer.begin() as connection:
        if writer.dialect.name == "postgresql":
            await connection.execute(
                text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK}
            )
        await connection.run_sync(_upgrade)


def _write_ahead(connection: Connection) -> None:
    cursor = connection.connection.cursor()  # not in a transaction
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.close()


def newest() -> str:
    """The last revision; the file names of revisions begin with their numbers."""
    return max(file.name.partition("_")[0] for file in (_MIGRATIONS / "versions").glob("[0-9]*.py"))


def _upgrade(connection: Connection) -> None:
    if MigrationContext.configure(connection).get_current_revision() == newest():
        return  # reading every revision would take longer than the rest of the start
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
