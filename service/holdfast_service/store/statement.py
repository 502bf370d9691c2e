"""A query that is written once and asked often.

SQLAlchemy looks at a query anew each time that one is executed: which of those that it has compiled
it is, which columns its rows have, what becomes of each value. That takes ten times what a small
database takes to answer. A `Statement` is looked at once for each kind of database, and its rows
are plain: columns by name or place, no objects that a session follows.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BindParameter, Connection, Dialect, Select, String, bindparam
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
    """What the query says itself, as the driver takes it."""
    row: Callable[[Sequence[Any]], Any] | None = None
    """Known once the database has said of which types the columns are."""


class Statement:
    """What varies in the query are `bindparam`s, of strings or numbers, given by name."""

    def __init__(self, query: AnySelect) -> None:
        self._query = query
        self._compiled: dict[str, _Compiled] = {}

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
        session.flush()  # what is written in this session is seen
        connection = session.connection()
        dialect = connection.dialect
        compiled = self._compiled.get(dialect.name)
        if compiled is None:
            compiled = self._compiled[dialect.name] = _compiled(self._query, dialect)
        given = {**compiled.fixed, **values}
        placed = tuple([given[name] for name in compiled.parameters])
        rows, types = _fetched(connection, compiled.text, placed)
        if compiled.row is None:
            compiled.row = _maker(self._query, dialect, types)
        return [compiled.row(one) for one in rows]


def _fetched(
    connection: Connection, text: str, values: tuple[object, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Rows as the driver makes them, and the types of their columns, as it names them. Its errors
    are raised as SQLAlchemy raises them."""
    cursor = connection.connection.cursor()
    try:
        cursor.execute(text, values)
        return cursor.fetchall(), [one[1] for one in cursor.description]
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
    finally:
        cursor.close()


def _compiled(query: AnySelect, dialect: Dialect) -> _Compiled:
    parts = visitors.iterate(query)
    wanted = {one.key for one in parts if isinstance(one, BindParameter) and one.required}
    compiled: Any = query.compile(dialect=dialect)
    expanded = compiled.construct_expanded_state(dict.fromkeys(wanted))
    processes: dict[str, Process | None] = {
        name: _impl(one.type, dialect).bind_processor(dialect)
        for name, one in compiled.binds.items()
    }
    processes.update(expanded.processors)
    fixed = {
        name: process(value) if (process := processes.get(name)) else value
        for name, value in expanded.parameters.items()
        if name not in wanted
    }
    return _Compiled(expanded.statement, tuple(expanded.positiontup), fixed)


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
