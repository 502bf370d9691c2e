"""Statements that are written once and executed often.

SQLAlchemy looks at a statement anew each time that one is executed: which of those that it has
compiled it is, which columns its rows have, what becomes of each value. That takes ten times what a
small database takes to answer. These are looked at once for each kind of database, and their rows
are plain: columns by name or place, no objects that a session follows.
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
"""The id of the job that a query is about."""

AnySelect = Select[*tuple[Any, ...]]
Process = Callable[[Any], Any]


@dataclass
class _Compiled:
    text: str
    parameters: tuple[str, ...]
    """By place."""
    fixed: Mapping[str, Any]
    """What the statement says itself, as the driver takes it."""
    processes: Mapping[str, Process]
    """What makes of a value what the driver takes, where it does not take it as it is."""
    row: Callable[[Sequence[Any]], Any] | None = None
    """Known once the database has said of which types the columns are."""

    def placed(self, values: Mapping[str, object]) -> tuple[Any, ...]:
        given = {**self.fixed, **values}
        for name, process in self.processes.items():
            if name in values:
                given[name] = process(given[name])
        return tuple([given[name] for name in self.parameters])


class _Once:
    """Compiled once for each kind of database."""

    def __init__(self) -> None:
        self._by_dialect: dict[str, _Compiled] = {}

    def _for(self, dialect: Dialect) -> _Compiled:
        compiled = self._by_dialect.get(dialect.name)
        if compiled is None:
            compiled = self._by_dialect[dialect.name] = self._compile(dialect)
        return compiled

    def _compile(self, dialect: Dialect) -> _Compiled:
        raise NotImplementedError


class Statement(_Once):
    """What varies in the query are `bindparam`s, of strings or numbers, given by name."""

    def __init__(self, query: AnySelect) -> None:
        super().__init__()
        self._query = query

    async def all(self, session: AsyncSession, **values: object) -> list[Any]:
        """Its rows, as named tuples."""
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
            session.flush()  # what is written in this session is seen
        connection = session.connection()
        compiled = self._for(connection.dialect)
        rows, types = _executed(connection, compiled.text, compiled.placed(values))
        if compiled.row is None:
            compiled.row = _maker(self._query, connection.dialect, types)
        return [compiled.row(one) for one in rows]

    def _compile(self, dialect: Dialect) -> _Compiled:
        return _compiled(self._query, dialect)


class Put(_Once):
    """A row of a model's table, written whole: a new one, or in place of the one with its key. No
    session follows it: who has the same row as an object in a session sees nothing of it."""

    def __init__(self, model: type[Any]) -> None:
        super().__init__()
        self._table: Table = model.__table__

    async def row(self, session: AsyncSession, **columns: object) -> None:
        """All columns of the table."""
        await session.run_sync(self._put, columns)

    def _put(self, session: Session, columns: Mapping[str, object]) -> None:
        connection = session.connection()
        compiled = self._for(connection.dialect)
        _executed(connection, compiled.text, compiled.placed(columns))

    def _compile(self, dialect: Dialect) -> _Compiled:
        return _put(self._table, dialect)


def _executed(
    connection: Connection, text: str, values: tuple[object, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Rows as the driver makes them, and the types of their columns, as it names them. Its errors
    are raised as SQLAlchemy raises them."""
    cursor = connection.connection.cursor()
    try:
        cursor.execute(text, values)
        columns: Sequence[Any] | None = cursor.description
        return (cursor.fetchall(), [one[1] for one in columns]) if columns else ((), ())
    except Exception as error:
        dialect = connection.dialect
        of_driver: Any = dialect.loaded_dbapi.Error
        if not isinstance(error, of_driver):
            raise
        lost = dialect.is_disconnect(error, connection.connection, cursor)
        if lost:
            connection.invalidate(error)
        raise DBAPIError.instance(
            text, values, error, of_driver, connection_invalidated=lost, dialect=dialect
        ) from error
    except BaseException as error:  # cancelled: what the database is about is not known
        connection.invalidate(error)
        raise
    finally:
        cursor.close()


def _compiled(query: AnySelect, dialect: Dialect) -> _Compiled:
    parts = visitors.iterate(query)
    wanted = {one.key for one in parts if isinstance(one, BindParameter) and one.required}
    compiled: Any = query.compile(dialect=dialect)
    expanded = compiled.construct_expanded_state(dict.fromkeys(wanted))
    processes = _processes(compiled, dialect) | expanded.processors
    fixed = {
        name: processes[name](value) if name in processes else value
        for name, value in expanded.parameters.items()
        if name not in wanted
    }
    return _Compiled(expanded.statement, tuple(expanded.positiontup), fixed, processes)


def _put(table: Table, dialect: Dialect) -> _Compiled:
    postgres = dialect.name == "postgresql"
    insert: Any = postgresql.insert(table) if postgres else sqlite.insert(table)
    rest = {one.name: insert.excluded[one.name] for one in table.columns if not one.primary_key}
    whole = insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=rest)
    names = [one.name for one in table.columns]
    compiled: Any = whole.compile(dialect=dialect, column_keys=names)
    text, places = compiled.string, tuple(compiled.positiontup)
    return _Compiled(text, places, {}, _processes(compiled, dialect))


def _processes(compiled: Any, dialect: Dialect) -> dict[str, Process]:
    found = {
        name: _impl(one.type, dialect).bind_processor(dialect)
        for name, one in compiled.binds.items()
    }
    return {name: process for name, process in found.items() if process is not None}


def _maker(
    query: AnySelect, dialect: Dialect, types: Sequence[Any]
) -> Callable[[Sequence[Any]], Any]:
    """From a row of the driver to one of ours."""
    columns = list(query.selected_columns)
    row_type: Any = namedtuple("row_type", [str(one.key) for one in columns], rename=True)  # type: ignore[misc]
    make: Callable[[Sequence[Any]], Any] = row_type._make
    processed: list[tuple[int, Process]] = []
    for place, (column, kind) in enumerate(zip(columns, types, strict=True)):
        process = _impl(column.type, dialect).result_processor(dialect, kind)
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


def _impl(kind: TypeEngine[Any], dialect: Dialect) -> Any:
    return kind.dialect_impl(dialect)
