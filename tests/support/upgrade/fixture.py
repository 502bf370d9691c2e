"""What a released version wrote: a database, the files of a data directory, and their meaning.

A folder below `written/` per version. `write.py` makes the folder of the present version; nothing
changes the folder of a released version. `@DATA_DIR@` stands for the data directory in all texts.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import (
    JSON,
    Boolean,
    Connection,
    MetaData,
    Table,
    create_engine,
    null,
    text,
)
from sqlalchemy.ext.asyncio import create_async_engine

from holdfast_service.store import migrate
from holdfast_service.store.engine import database_url

WRITTEN = Path(__file__).parent / "written"
DATA_DIR = "@DATA_DIR@"
DATABASE = "holdfast.db"
DUMP = "database.sql"
ANSWERS = "answers.json"
TAKEOVERS = "takeovers.json"
TRAINED = "trained.json"
CLIENT_CONFIG = "config.json"
FILES = "files"
MEMORY = "memory"
CORPUS = "corpus/text.txt"
_TEXTS = (".json",)
_MIGRATIONS = Path(migrate.__file__).parent / "migrations"


@dataclass(frozen=True)
class Written:
    """The folder of one version."""

    folder: Path

    @property
    def dump(self) -> str:
        return (self.folder / DUMP).read_text()

    def json(self, name: str, data_dir: Path) -> Any:
        return json.loads((self.folder / name).read_text().replace(DATA_DIR, str(data_dir)))

    def install(self, data_dir: Path) -> None:
        """Make `data_dir` the data directory that the version left, with its SQLite database."""
        shutil.copytree(self.folder / FILES, data_dir, dirs_exist_ok=True)
        for path in data_dir.rglob("*"):
            if path.suffix in _TEXTS and "checkpoints" not in path.parts:
                path.write_text(path.read_text().replace(DATA_DIR, str(data_dir)))
            if path.suffix == ".key":
                path.chmod(0o600)  # which a repository does not keep
        restored = sqlite3.connect(data_dir / DATABASE)
        restored.executescript(self.dump.replace(DATA_DIR, str(data_dir)))
        restored.close()


def versions() -> list[Written]:
    return [Written(folder) for folder in sorted(WRITTEN.iterdir())]


def dump_of(data_dir: Path) -> str:
    """The SQLite database of the data directory as text."""
    database = sqlite3.connect(data_dir / DATABASE)
    lines = "\n".join(database.iterdump())
    database.close()
    return lines.replace(str(data_dir), DATA_DIR) + "\n"


def schema_of(database: sqlite3.Connection) -> dict[str, str]:
    """Name -> CREATE statement of every table and index."""
    return dict(
        database.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    )


def upgrade_to(connection: Connection, revision: str) -> None:
    """Run the migrations up to this revision."""
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


async def copy_to_postgres(data_dir: Path, url: str) -> None:
    """Copy the SQLite database of the data directory to an empty PostgreSQL database, which first
    gets the schema of the same revision."""
    engine = create_async_engine(database_url(url))
    try:
        async with engine.begin() as target:
            await target.run_sync(_copy, data_dir / DATABASE)
    finally:
        await engine.dispose()


def _copy(target: Connection, file: Path) -> None:
    source = create_engine(f"sqlite:///{file}")
    with source.connect() as database:
        revision = database.scalar(text("SELECT version_num FROM alembic_version"))
        upgrade_to(target, str(revision))
        tables = MetaData()
        tables.reflect(target)
        for table in tables.sorted_tables:
            rows = database.execute(text(f"SELECT * FROM {table.name}")).mappings()
            values = [_values(table, dict(row)) for row in rows]
            if values and table.name != "alembic_version":
                target.execute(table.insert(), values)
    source.dispose()


def _values(table: Table, row: dict[str, Any]) -> dict[str, Any]:
    """The row of SQLite as values for this PostgreSQL table."""
    return {name: _value(table.c[name].type, stored) for name, stored in row.items()}


def _value(column_type: object, stored: Any) -> Any:
    if isinstance(column_type, JSON):
        return null() if stored is None else json.loads(stored)
    if isinstance(column_type, Boolean):
        return bool(stored)
    return stored
