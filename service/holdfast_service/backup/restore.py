"""Restores a backup into an empty database, of either kind.

First the whole file is verified, and everything is checked that could be refused. Then the keys
are written, and in one transaction the schema of the backup, its rows and the missing migrations. A
restore that dies leaves an empty database, and keys that the next restore finds equal.

Every job that has not ended is marked: the reconciler asks the cluster about it before it does
anything else (reconcile/restored_job.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, inspect, literal, null, select
from sqlalchemy import insert as insert_into
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from holdfast_service.backup.backup_file import BackupError, BackupManifest, BackupReader
from holdfast_service.backup.keys import is_job_key, place_of, read_key
from holdfast_service.backup.make import Progress, refusals, saved_settings, sqlite_file
from holdfast_service.backup.table_rows import columns_of, insert, present_tables
from holdfast_service.job_model.lifecycle import TERMINAL
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store, is_refused
from holdfast_service.store.installation import fingerprint_of
from holdfast_service.store.migrate import newest_revision, require_known, upgrade
from holdfast_service.store.models import Base, Intent, JobRecord
from holdfast_service.store.transaction import Effect
from holdfast_workers.private_files import create_private


@dataclass(frozen=True)
class Preview:
    """What a restore does, and what the operator should know about it."""

    manifest: BackupManifest
    target: str
    new_keys: tuple[str, ...]
    upgrades_to: str | None
    """The schema that the rows are migrated to; None: the backup has the newest."""
    changed_settings: Mapping[str, tuple[Any, Any]]
    """Name -> value in the backup, value now."""
    advice: tuple[str, ...]


async def restore(
    settings: Settings, path: Path, *, check: bool, progress: Progress = lambda line: None
) -> Preview:
    """Restore the backup; with `check`, only verify that it could be. Raises BackupError; then the
    database is as it was."""
    with refusals(), closing(BackupReader(path)) as backup:
        manifest = backup.manifest
        require_known(manifest.revision, f"the backup (made by Holdfast {manifest.version})")
        backup.verify()
        progress(f"{path} is complete: {len(manifest.members)} members")
        keys = _missing_keys(backup, settings)
        plan = _plan(manifest, settings, keys)
        file = sqlite_file(settings)
        if check and file is not None and not file.exists():  # to connect would create it
            return plan
        store = Store.at(settings)
        try:
            if check:
                async with store.exclusive() as connection:
                    await connection.run_sync(_require_empty, plan.target)
            else:
                await _restore(store, backup, plan, keys, progress)
        finally:
            await store.close()
        return plan


async def _restore(
    store: Store,
    backup: BackupReader,
    plan: Preview,
    keys: Mapping[Path, bytes],
    progress: Progress,
) -> None:
    async with store.exclusive() as connection:
        await connection.run_sync(_require_empty, plan.target)
        # Keys first: a server that starts before the commit finds an empty database, and makes no
        # key that would be in the way.
        for path, content in keys.items():
            create_private(path, content)
        await connection.run_sync(upgrade, plan.manifest.revision)
        await _insert(connection, backup, progress)
        await connection.run_sync(upgrade)
        await _mark_jobs(connection)


async def _insert(connection: AsyncConnection, backup: BackupReader, progress: Progress) -> None:
    saved = {each.table: each for each in backup.manifest.tables}
    tables = await connection.run_sync(present_tables)
    for table in tables:
        await connection.execute(table.delete())  # rows that a migration has made
    for table in tables:
        contents = saved.pop(table.name, None)
        if contents is None or contents.columns != columns_of(table):
            raise BackupError(
                f"the backup's table {table.name} is not that of its schema: use another backup"
            )
        lines = backup.lines(contents)
        try:
            rows = await insert(
                connection, table, contents.columns, lines, backup.manifest.newest_change
            )
        except DBAPIError as error:
            if not is_refused(error):
                raise
            raise BackupError(
                f"this database refuses a row of {table.name}: {error.orig}; restore into the "
                f"kind of database that the backup is of ({backup.manifest.database})"
            ) from error
        if rows != contents.rows:
            raise BackupError(f"the backup has {rows} rows of {table.name}, not {contents.rows}")
        progress(f"{table.name}: {rows} rows")
    if saved:
        raise BackupError(f"the backup has unknown tables: {', '.join(saved)}")


async def _mark_jobs(connection: AsyncConnection) -> None:
    """Mark the jobs that the cluster must be asked about."""
    names = ["job_id", "name", "at", "done_at", "times"]
    values = (literal(Effect.RESTORED.value), literal(time.time()), null(), literal(0))
    alive = select(JobRecord.id, *values).where(JobRecord.state.not_in(TERMINAL))
    await connection.execute(insert_into(Intent).from_select(names, alive))


def _require_empty(connection: Connection, target: str) -> None:
    present = {*Base.metadata.tables, "alembic_version"} & {*inspect(connection).get_table_names()}
    if not present:
        return
    jobs = 0
    if JobRecord.__tablename__ in present:
        jobs = connection.scalar(select(func.count()).select_from(JobRecord)) or 0
    raise BackupError(
        f"{target} is not empty ({jobs} jobs): a backup is restored into a new database only. "
        "Create one and name it with --database-url, or stop the server and move the files "
        "holdfast.db* of the data directory away"
    )


def _missing_keys(backup: BackupReader, settings: Settings) -> dict[Path, bytes]:
    """The keys to write. Raises BackupError if others are in their place."""
    found: dict[Path, bytes] = {}
    for contents in backup.manifest.keys:
        path, content = place_of(contents.name, settings), backup.read(contents)
        if not path.exists():
            found[path] = content
        elif read_key(path) != content:
            raise BackupError(
                f"{path} is another key than the backup's: move it away, or choose an empty "
                "--data-dir (or HOLDFAST_KEYS_DIR)"
            )
    fingerprint, key = backup.manifest.key_fingerprint, settings.job_key_file
    if key.exists() and fingerprint not in (None, fingerprint_of(read_key(key))):
        raise BackupError(
            f"{key} is not the key of the installation that was backed up: move it away, and copy "
            "the right one there"
        )
    return found


def _plan(manifest: BackupManifest, settings: Settings, keys: Mapping[Path, bytes]) -> Preview:
    saved, now = manifest.settings, saved_settings(settings)
    names = sorted(saved.keys() & now.keys())
    advice = []
    has_key = settings.job_key_file.exists() or any(is_job_key(k.name) for k in manifest.keys)
    if manifest.key_fingerprint is not None and not has_key:
        advice.append(
            f"the backup has no keys: copy the installation's to {settings.job_key_file} (and "
            f"secrets to {settings.secrets_dir}) before a server starts"
        )
    if saved.get("data_dir") != now["data_dir"]:
        advice.append(
            "checkpoints and fences of jobs without checkpoint.remote.uri are not in the backup: "
            f"copy the folder jobs of {saved.get('data_dir')} to {now['data_dir']}"
        )
    return Preview(
        manifest=manifest,
        target=_shown_target(settings),
        new_keys=tuple(map(str, keys)),
        upgrades_to=None if manifest.revision == newest_revision() else newest_revision(),
        changed_settings={
            name: (saved[name], now[name]) for name in names if saved[name] != now[name]
        },
        advice=tuple(advice),
    )


def _shown_target(settings: Settings) -> str:
    file = sqlite_file(settings)
    return f"the database {file}" if file is not None else "the PostgreSQL database"
