"""The rows of all tables as lines of JSON, in a form that both kinds of database can give and take.

| Kind | Columns | In a line |
|---|---|---|
| `json` | documents | their text, unchanged |
| `bytes` | | base64 |
| `text`, `int`, `float`, `bool` | | as they are |

What belongs to the running servers stays out: leases and their owners, and operations. Change
numbers do too, as each database counts in its own way: after a restore all rows have a number that
is greater than all before. Rows are in the order of their keys, so equal tables have equal lines.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    ColumnElement,
    Connection,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    Select,
    String,
    Table,
    Text,
    bindparam,
    cast,
    func,
    literal,
    null,
    select,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from holdfast_service.backup.backup_file import BackupError
from holdfast_service.store.change_numbers import TABLES as NUMBERED_TABLES
from holdfast_service.store.change_numbers import NextChange
from holdfast_service.store.models import Base, LeaseOwner, Operation
from holdfast_service.store.transaction import Effect

_TABLES = frozenset(Base.metadata.tables) - {
    LeaseOwner.__tablename__,
    Operation.__tablename__,
}
"""A migration that drops a table must leave its name here: older schemas have it."""
_LEASES = ("lease_owner", "lease_token")
_CHANGED = "changed"
_JUMP = 1 << 32
"""More changes than the servers can have made since a backup."""
_BATCH_ROWS, _BATCH_BYTES = 500, 4 << 20
_LARGE_ROWS = frozenset({"code_packages"})
"""Tables with rows of many megabytes, which are fetched one by one."""


def present_tables(connection: Connection) -> list[Table]:
    """The tables of the schema that the database has, parents first."""
    metadata = MetaData()
    metadata.reflect(connection, only=lambda name, _: name in _TABLES)
    return metadata.sorted_tables


def columns_of(table: Table) -> dict[str, str]:
    """Name -> kind of the columns that a backup has."""
    return {
        column.name: _kind(column.type)
        for column in table.columns
        if not (column.name == _CHANGED and table.name in NUMBERED_TABLES)
    }


async def lines_of(connection: AsyncConnection, table: Table) -> AsyncIterator[bytes]:
    """The rows of the table, in a transaction with one snapshot."""
    kinds = list(columns_of(table).values())
    at_once = 1 if table.name in _LARGE_ROWS else 100
    statement = _select(table, postgres=connection.dialect.name == "postgresql")
    found = await connection.stream(statement, execution_options={"yield_per": at_once})
    async for row in found:
        values = [_encoded(kind, value) for kind, value in zip(kinds, row, strict=True)]
        yield json.dumps(values, separators=(",", ":")).encode() + b"\n"


async def newest_change(connection: AsyncConnection, tables: Iterable[Table]) -> int:
    newest = 0
    for table in tables:
        if table.name in NUMBERED_TABLES:
            found = await connection.scalar(select(func.max(table.c[_CHANGED])))
            newest = max(newest, found or 0)
    return newest


async def insert(
    connection: AsyncConnection,
    table: Table,
    columns: Mapping[str, str],
    lines: Iterable[bytes],
    newest: int,
) -> int:
    """Insert the rows of a backup with these columns and this newest change number; returns their
    number. Raises BackupError for lines that are no such rows."""
    postgres = connection.dialect.name == "postgresql"
    values: dict[str, ColumnElement[Any]] = {
        name: _parameter(table, name, kind, postgres) for name, kind in columns.items()
    }
    if table.name in NUMBERED_TABLES:
        values[_CHANGED] = NextChange() if postgres else literal(newest + _JUMP, BigInteger)
    statement = table.insert().values(values)
    rows = 0
    for batch in _batches(lines):
        await connection.execute(statement, [_row(table.name, columns, line) for line in batch])
        rows += len(batch)
    return rows


def _select(table: Table, postgres: bool) -> Select[Any]:
    statement = select(*(_selected(table, *column) for column in columns_of(table).items()))
    if table.name == "intents":
        statement = statement.where(table.c.name != Effect.RESTORED)
    keys = list(table.primary_key.columns)
    # SQLite compares texts by their bytes.
    order = [key.collate("C") if postgres and isinstance(key.type, String) else key for key in keys]
    return statement.order_by(*order)


def _selected(table: Table, name: str, kind: str) -> ColumnElement[Any]:
    if name in _LEASES:
        return null().label(name)
    column = table.c[name]
    return cast(column, Text).label(name) if kind == "json" else column


def _kind(of: object) -> str:
    match of:
        case JSON():
            return "json"
        case LargeBinary():
            return "bytes"
        case Boolean():
            return "bool"
        case Integer():
            return "int"
        case Float() | Numeric():
            return "float"
        case String():
            return "text"
    raise TypeError(f"no kind for a column of type {of!r}")


def _encoded(kind: str, value: Any) -> Any:
    if value is None:
        return None
    return base64.b64encode(value).decode() if kind == "bytes" else value


def _parameter(table: Table, name: str, kind: str, postgres: bool) -> ColumnElement[Any]:
    if kind != "json":
        return bindparam(f"p_{name}", type_=table.c[name].type)
    text = bindparam(f"p_{name}", type_=Text())
    return cast(text, JSON) if postgres else text


def _row(table: str, columns: Mapping[str, str], line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
        if not isinstance(values, list) or len(values) != len(columns):
            raise ValueError("another number of columns")
        return {
            f"p_{name}": _decoded(kind, value)
            for (name, kind), value in zip(columns.items(), values, strict=True)
        }
    except (ValueError, TypeError) as error:
        raise BackupError(f"a row of {table} cannot be read ({error})") from error


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "bytes": lambda value: base64.b64decode(value, validate=True),
    "float": float,
    "bool": bool,
}


def _decoded(kind: str, value: Any) -> Any:
    try:
        return value if value is None else _DECODERS.get(kind, lambda same: same)(value)
    except binascii.Error as error:
        raise ValueError(str(error)) from error


def _batches(lines: Iterable[bytes]) -> Iterator[Sequence[bytes]]:
    batch: list[bytes] = []
    nbytes = 0
    for line in lines:
        batch.append(line)
        nbytes += len(line)
        if len(batch) >= _BATCH_ROWS or nbytes >= _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
