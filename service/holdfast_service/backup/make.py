"""Makes a backup while servers and jobs run: all rows of one snapshot, and the keys."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sqlalchemy import Table, select
from sqlalchemy.ext.asyncio import AsyncConnection

from holdfast_service.backup.backup_file import (
    BackupError,
    BackupManifest,
    BackupWriter,
    Contents,
    TableContents,
)
from holdfast_service.backup.keys import is_job_key, present_keys, read_key
from holdfast_service.backup.table_rows import (
    columns_of,
    lines_of,
    newest_change,
    present_tables,
)
from holdfast_service.extras import DISTRIBUTION
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store, UnsupportedDatabase, database_url, said_plainly
from holdfast_service.store.installation import fingerprint_of
from holdfast_service.store.migrate import UnknownSchema, known_revision
from holdfast_service.store.models import Installation

_NOT_SAVED = frozenset({"database_url", "webhook_url", "webhook_secret", "crash_at", "pace"})
"""Settings that may have a secret in them, or are for tests."""

Progress = Callable[[str], None]


async def make_backup(
    settings: Settings,
    path: Path,
    *,
    with_keys: bool,
    replace: bool,
    progress: Progress = lambda line: None,
) -> tuple[BackupManifest, int]:
    """Back up the installation of these settings to `path`; returns the size of the file, too.

    Raises BackupError; then there is no new file.
    """
    with refusals():
        return await _make(settings, path, with_keys, replace, progress)


async def _make(
    settings: Settings, path: Path, with_keys: bool, replace: bool, progress: Progress
) -> tuple[BackupManifest, int]:
    _require_sqlite_file(settings)
    store = Store.at(settings)
    try:
        with BackupWriter(path, replace=replace) as writer:
            async with store.read(long=True) as session:
                with said_plainly():
                    connection = await session.connection()
                revision = await connection.run_sync(known_revision)
                if revision is None:
                    raise BackupError(
                        "the database has no schema: no server was started on it yet; are "
                        "--data-dir and --database-url those of the server?"
                    )
                tables = await connection.run_sync(present_tables)
                identity = select(Installation.id, Installation.key_fingerprint)
                installation = (await connection.execute(identity)).one_or_none()
                fingerprint = installation.key_fingerprint if installation else None
                keys = _add_keys(writer, settings, fingerprint) if with_keys else ()
                contents = [await _add(writer, connection, each, progress) for each in tables]
                newest = await newest_change(connection, tables)
            manifest = BackupManifest(
                version=version(DISTRIBUTION),
                revision=revision,
                made_at=time.time(),
                database=connection.dialect.name,
                installation=installation.id if installation else "",
                key_fingerprint=fingerprint,
                newest_change=newest,
                settings=saved_settings(settings),
                tables=tuple(contents),
                keys=tuple(keys),
            )
            return manifest, writer.finish(manifest)
    finally:
        await store.close()


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """The refusals of a database as BackupError."""
    try:
        yield
    except (UnknownSchema, UnsupportedDatabase) as error:
        raise BackupError(str(error)) from error


def saved_settings(settings: Settings) -> dict[str, Any]:
    """The settings that are no secrets, as JSON."""
    return settings.model_dump(mode="json", exclude=set(_NOT_SAVED))


def sqlite_file(settings: Settings) -> Path | None:
    """The file of the database; None: it is on PostgreSQL. Raises UnsupportedDatabase."""
    url = database_url(settings.resolved_database_url())
    return Path(url.database or "") if url.get_backend_name() == "sqlite" else None


def _require_sqlite_file(settings: Settings) -> None:
    """Raises BackupError: to connect would create the file."""
    file = sqlite_file(settings)
    if file is not None and not file.is_file():
        raise BackupError(
            f"there is no database {file}: give the server's --data-dir or --database-url, also as "
            "HOLDFAST_DATA_DIR or HOLDFAST_DATABASE_URL"
        )


def _add_keys(
    writer: BackupWriter, settings: Settings, fingerprint: str | None
) -> tuple[Contents, ...]:
    added = []
    for name, path in present_keys(settings):
        content = read_key(path)
        if is_job_key(name) and fingerprint not in (None, fingerprint_of(content)):
            raise BackupError(
                f"{path} is not the key of this database: give the server's HOLDFAST_KEYS_DIR and "
                "--data-dir, or --without-keys"
            )
        with writer.member(name) as member:
            member.write(content)
        added.append(member.contents())
    if fingerprint is not None and not any(is_job_key(each.name) for each in added):
        raise BackupError(
            f"there is no key {settings.job_key_file}: give the server's HOLDFAST_KEYS_DIR and "
            "--data-dir, or --without-keys if the keys are kept elsewhere"
        )
    return tuple(added)


async def _add(
    writer: BackupWriter, connection: AsyncConnection, table: Table, progress: Progress
) -> TableContents:
    rows = 0
    with writer.member(f"tables/{table.name}.jsonl") as member:
        async for line in lines_of(connection, table):
            member.write(line)
            rows += 1
    progress(f"{table.name}: {rows} rows")
    return TableContents(
        **member.contents().model_dump(), table=table.name, columns=columns_of(table), rows=rows
    )
