"""Statements that are compiled once per dialect and executed often.

SQLAlchemy analyses a statement on each execution: its cache key, the columns of its rows, the
processors of its values. That takes ten times as long as a small database takes to answer. The
statements of this module are analysed once per dialect, and their rows are named tuples, not
objects tracked by a session.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BindParameter, Connection, Dialect, Select, String, Table, bindparam
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.sql import visitors
from sqlalchemy.types import TypeEngine

JOB: BindParameter[str] = bindparam("job", type_=String)
"""The id of the job in a query."""

AnySelect = Select[*tuple[Any, ...]]
Process = Callable[[Any], Any]


@dataclass
class _Compiled:
    text: str
    parameters: tuple[str, ...]
    """Parameter names, in positional order."""
    fixed: Mapping[str, Any]
    """Constants of the statement, in the driver's format."""
    processes: Mapping[str, Process]
    """Converters to the driver's format, for the parameters that need one."""
    row: Callable[[Sequence[Any]], Any] | None = None
    """Builds result rows; known once the database has reported the column types."""

    def positional(self, values: Mapping[str, object]) -> tuple[Any, ...]:
        given = {**self.fixed, **values}
        for name, process in self.processes.items():
            if name in values:
                given[name] = process(given[name])
        return tuple([given[name] for name in self.parameters])


class _CompiledOnce:
    """Base of statements that are compiled once per dialect."""

    def __init__(self) -> None:
        self._by_dialect: dict[str, _Compiled] = {}

    def _for(self, dialect: Dialect) -> _Compiled:
        compiled = self._by_dialect.get(dialect.name)
        if compiled is None:
            compiled = self._by_dialect[dialect.name] = self._compile(dialect)
        return compiled

    def _compile(self, dialect: Dialect) -> _Compiled:
        raise NotImplementedError


class Statement(_CompiledOnce):
    """A query. Its variable parts are `bindparam`s of strings or numbers, given by name."""

    def __init__(self, query: AnySelect) -> None:
        super().__init__()
        self._query = query

    async def all(self, session: AsyncSession, **values: object) -> list[Any]:
        """All rows, as named tuples."""
        return await session.run_sync(self._rows, values)

    async def first(self, session: AsyncSession, **values: object) -> Any | None:
        rows = await self.all(session, **values)
        return rows[0] if rows else None

    async def value(self, session: AsyncSession, **values: object) -> Any | None:
        """The first column of the first row."""
        row = await self.first(session, **values)
        return None if row is None else row[0]

    async def values(self, session: AsyncSession, **values: object) -> list[Any]:
        """The first column of each row."""
        return [row[0] for row in await self.all(session, **values)]

    def _rows(self, session: Session, values: Mapping[str, object]) -> list[Any]:
        if session.autoflush:
            session.flush()  # the query sees pending writes of this session
        connection = session.connection()
        compiled = self._for(connection.dialect)
        rows, types = _execute(connection, compiled.text, compiled.positional(values))
        if compiled.row is None:
            compiled.row = _row_factory(self._query, connection.dialect, types)
        return [compiled.row(row) for row in rows]

    def _compile(self, dialect: Dialect) -> _Compiled:
        return _compile_query(self._query, dialect)


class Upsert(_CompiledOnce):
    """Inserts a complete row into a model's table, or replaces the row with the same key. Sessions
    do not track the write: an object of the same row in a session keeps its old values."""

    def __init__(self, model: type[Any]) -> None:
        super().__init__()
        self._table: Table = model.__table__

    async def row(self, session: AsyncSession, **columns: object) -> None:
        """Write one row; `columns` must name all columns of the table."""
        await session.run_sync(self._execute_upsert, columns)

    def _execute_upsert(self, session: Session, columns: Mapping[str, object]) -> None:
        connection = session.connection()
        compiled = self._for(connection.dialect)
        _execute(connection, compiled.text, compiled.positional(columns))

    def _compile(self, dialect: Dialect) -> _Compiled:
        return _compile_upsert(self._table, dialect)


def _execute(
    connection: Connection, text: str, values: tuple[object, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """The driver's rows, and the driver's types of their columns. Wraps the driver's errors in
    those of SQLAlchemy."""
    cursor = connection.connection.cursor()
    try:
        cursor.execute(text, values)
        columns: Sequence[Any] | None = cursor.description
        return (cursor.fetchall(), [column[1] for column in columns]) if columns else ((), ())
    except Exception as error:
        dialect = connection.dialect
        driver_error: Any = dialect.loaded_dbapi.Error
        if not isinstance(error, driver_error):
            raise
        lost = dialect.is_disconnect(error, connection.connection, cursor)
        if lost:
            connection.invalidate(error)
        raise DBAPIError.instance(
            text, values, error, driver_error, connection_invalidated=lost, dialect=dialect
        ) from error
    except BaseException as error:  # cancelled: the state of the connection is unknown
        connection.invalidate(error)
        raise
    finally:
        cursor.close()


def _compile_query(query: AnySelect, dialect: Dialect) -> _Compiled:
    parts = visitors.iterate(query)
    required = {part.key for part in parts if isinstance(part, BindParameter) and part.required}
    compiled: Any = query.compile(dialect=dialect)
    expanded = compiled.construct_expanded_state(dict.fromkeys(required))
    processes = _bind_processors(compiled, dialect) | expanded.processors
    fixed = {
        name: processes[name](value) if name in processes else value
        for name, value in expanded.parameters.items()
        if name not in required
    }
    return _Compiled(expanded.statement, tuple(expanded.positiontup), fixed, processes)


def _compile_upsert(table: Table, dialect: Dialect) -> _Compiled:
    postgres = dialect.name == "postgresql"
    insert: Any = postgresql.insert(table) if postgres else sqlite.insert(table)
    rest = {
        column.name: insert.excluded[column.name]
        for column in table.columns
        if not column.primary_key
    }
    whole = insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=rest)
    names = [column.name for column in table.columns]
    compiled: Any = whole.compile(dialect=dialect, column_keys=names)
    text, places = compiled.string, tuple(compiled.positiontup)
    return _Compiled(text, places, {}, _bind_processors(compiled, dialect))


def _bind_processors(compiled: Any, dialect: Dialect) -> dict[str, Process]:
    found = {
        name: _dialect_type(bind.type, dialect).bind_processor(dialect)
        for name, bind in compiled.binds.items()
    }
    return {name: process for name, process in found.items() if process is not None}


def _row_factory(
    query: AnySelect, dialect: Dialect, types: Sequence[Any]
) -> Callable[[Sequence[Any]], Any]:
    """A function that converts a driver row to a named tuple."""
    columns = list(query.selected_columns)
    row_type: Any = namedtuple("row_type", [str(column.key) for column in columns], rename=True)  # type: ignore[misc]
    make: Callable[[Sequence[Any]], Any] = row_type._make
    processed: list[tuple[int, Process]] = []
    for place, (column, kind) in enumerate(zip(columns, types, strict=True)):
        process = _dialect_type(column.type, dialect).result_processor(dialect, kind)
        if process is not None:
            processed.append((place, process))
    if not processed:
        return make

    def made(row: Sequence[Any]) -> Any:
        values = list(row)
        for place, process in processed:
            values[place] = process(values[place])
        return make(values)

    return made


def _dialect_type(kind: TypeEngine[Any], dialect: Dialect) -> Any:
    return kind.dialect_impl(dialect)
