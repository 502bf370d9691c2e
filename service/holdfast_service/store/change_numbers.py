"""Growing change numbers of job rows, by which a reader finds the rows changed since its last poll.

SQLite has one writer at a time: the next number is the largest number plus one; a removed job keeps
the number of its removal, so that none is used again. PostgreSQL has many writers, and a counter
would become visible out of order; there the change number is the id of the writing transaction, and
a reader continues from the oldest transaction that was still running at its last poll. A reader may
therefore see a change twice, and never misses a change. Readers of jobs drop the rows that they
have already seen.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement

TABLES = ("jobs", "removed_jobs")
"""The tables whose rows have change numbers."""

RESET_FUTURE_NUMBERS = tuple(
    f"""
    UPDATE {table} SET changed = 0
    WHERE changed >= CAST(CAST(pg_snapshot_xmax(pg_current_snapshot()) AS text) AS bigint)
    """
    for table in TABLES
)
"""PostgreSQL: resets numbers above every transaction id of this server. Such numbers come from
another server whose dump was restored here; readers would report those rows as new forever."""


class NextChange(FunctionElement[int]):
    """The change number of the row being written: greater than all before."""

    type = BigInteger()
    inherit_cache = True
    name = "next_change"


class FirstUnsettled(FunctionElement[int]):
    """The first number whose change may not be visible yet in the current transaction."""

    type = BigInteger()
    inherit_cache = True
    name = "first_unsettled"


@compiles(NextChange, "sqlite")
@compiles(FirstUnsettled, "sqlite")
def _sqlite(_element: FunctionElement[int], _compiler: Any, **_kw: Any) -> str:
    newest = (f"coalesce((SELECT max(changed) FROM {table}), 0)" for table in TABLES)
    return f"(max({', '.join(newest)}) + 1)"


@compiles(NextChange, "postgresql")
def _postgresql(_element: NextChange, _compiler: Any, **_kw: Any) -> str:
    return "CAST(CAST(pg_current_xact_id() AS text) AS bigint)"


@compiles(FirstUnsettled, "postgresql")
def _oldest_running(_element: FirstUnsettled, _compiler: Any, **_kw: Any) -> str:
    return "CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text) AS bigint)"
