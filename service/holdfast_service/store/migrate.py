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
_FIRST = "0008"  # earlier revisions were written by pre-releases
_ADVISORY_LOCK = 0x486F6C64  # "Hold": one migration at a time in a PostgreSQL database


class UnknownSchema(Exception):
    """The database was written by another version of Holdfast, whose schema this one does not know;
    the message says what to do."""


async def migrate(writer: AsyncEngine) -> None:
    """Run every revision that is missing, in one transaction that excludes other writers. Raises
    UnknownSchema."""
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


def _upgrade(connection: Connection) -> None:
    present = MigrationContext.configure(connection).get_current_revision()
    known = {file.name.partition("_")[0] for file in (_MIGRATIONS / "versions").glob("[0-9]*.py")}
    newest = max(known)
    if present == newest:
        return  # reading every revision would take longer than the rest of the start
    if present is not None and present not in known:
        raise UnknownSchema(_unknown(present, newest))
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _unknown(present: str, newest: str) -> str:
    if present < _FIRST:
        return (
            f"the database has schema version {present}, written by a pre-release of Holdfast, and "
            f"this version reads {_FIRST} and later: start with an empty database "
            "(--database-url, --data-dir), or export its jobs with the version that wrote it"
        )
    return (
        f"the database has schema version {present}, written by a later version of Holdfast, and "
        f"this version reads up to {newest}: start the later version, or start with an empty "
        "database (--database-url, --data-dir)"
    )
