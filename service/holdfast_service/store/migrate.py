"""Migrates the database schema at start; safe when several processes start at once.

The revisions are in `migrations/` and ship in the wheel. Tables are created only by migrations.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from holdfast_service.extras import DISTRIBUTION

_MIGRATIONS = Path(__file__).parent / "migrations"
_ADVISORY_LOCK = 0x486F6C64  # "Hold": one migration at a time in a PostgreSQL database


class UnknownSchema(Exception):
    """The database was written by another version of Holdfast, whose schema this one does not know;
    the message says what to do."""


async def migrate(writer: AsyncEngine) -> None:
    """Run every revision that is missing. Raises UnknownSchema."""
    async with exclusive(writer) as connection:
        await connection.run_sync(upgrade)


@asynccontextmanager
async def exclusive(writer: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """One transaction that excludes other writers, on PostgreSQL other such transactions."""
    if writer.dialect.name == "sqlite":
        # In WAL mode readers and the writer do not block each other; the file keeps the setting.
        async with writer.connect() as connection:
            await connection.run_sync(_write_ahead)
    async with writer.begin() as connection:
        if writer.dialect.name == "postgresql":
            await connection.execute(
                text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK}
            )
        yield connection


def newest_revision() -> str:
    """The schema of this version."""
    return max(_known())


def known_revision(connection: Connection) -> str | None:
    """The schema of the database; None: it has none. Raises UnknownSchema."""
    present = MigrationContext.configure(connection).get_current_revision()
    if present is not None:
        require_known(present, "the database")
    return present


def require_known(revision: str, what: str) -> None:
    """Raises UnknownSchema, about `what` has this revision, unless this version can read it."""
    if revision not in _known():
        raise UnknownSchema(_unknown(revision, what))


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Run the missing revisions up to this one. Raises UnknownSchema."""
    if known_revision(connection) == newest_revision():
        return  # reading every revision would take longer than the rest of the start
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def _known() -> set[str]:
    return {file.name.partition("_")[0] for file in (_MIGRATIONS / "versions").glob("[0-9]*.py")}


def _write_ahead(connection: Connection) -> None:
    cursor = connection.connection.cursor()  # not in a transaction
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.close()


def _unknown(present: str, what: str) -> str:
    if present < (first := min(_known())):
        return (
            f"{what} has schema version {present}, written by a pre-release of Holdfast, and "
            f"this version reads {first} and later: start with an empty database "
            "(--database-url, --data-dir), or export its jobs with the version that wrote it"
        )
    return (
        f"{what} has schema version {present}, written by a later version of Holdfast, and "
        f"this one, {version(DISTRIBUTION)}, reads up to {newest_revision()}: upgrade this "
        "installation, or restore a backup of this version into an empty database "
        "(--database-url, --data-dir)"
    )
