"""Bring a database's schema up to date, at start, however many processes start at once.

The revisions are in `migrations/` and travel in the wheel. Nobody creates tables any other way.
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
        # Readers and the writer do not wait for each other; kept in the file once set.
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
    """The last revision; their files begin with their numbers."""
    return max(file.name.partition("_")[0] for file in (_MIGRATIONS / "versions").glob("[0-9]*.py"))


def _upgrade(connection: Connection) -> None:
    if MigrationContext.configure(connection).get_current_revision() == newest():
        return  # without reading every revision, which takes longer than all else at a start
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
