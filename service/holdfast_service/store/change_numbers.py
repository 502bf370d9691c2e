"""Numbers that grow with the writing of jobs, so that a reader finds what changed since it looked.

SQLite has one writer at a time: the next number is one more than the largest. PostgreSQL has many,
whose numbers would become visible out of order; there a change bears the number of its transaction,
and a reader goes on from the oldest transaction that had not ended when it looked. So it may read
a change twice, and never misses one. Readers of jobs drop what they have seen.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement

NOT_YET_READ = "CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text) AS bigint)"
"""PostgreSQL: changes from this number on may not be visible yet, in the transaction that asks."""

FORGET_THOSE_TO_COME = """
    UPDATE jobs SET changed = 0
    WHERE changed >= CAST(CAST(pg_snapshot_xmax(pg_current_snapshot()) AS text) AS bigint)
"""
"""PostgreSQL: numbers that no transaction has had yet are those of another server, out of whose
dump the database was restored; readers would take them for new again and again."""


class NextChange(FunctionElement[int]):
    """The number of a change that is being written."""

    type = BigInteger()
    inherit_cache = True
    name = "next_change"


@compiles(NextChange, "sqlite")
def _sqlite(_element: NextChange, _compiler: Any, **_kw: Any) -> str:
    return "(SELECT coalesce(max(changed), 0) + 1 FROM jobs)"


@compiles(NextChange, "postgresql")
def _postgresql(_element: NextChange, _compiler: Any, **_kw: Any) -> str:
    return "CAST(CAST(pg_current_xact_id() AS text) AS bigint)"
