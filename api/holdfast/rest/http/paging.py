"""The parameters of lists: where a page starts, and how many items it has at most."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query

from holdfast.rest.http.problems import ProblemError
from holdfast_service.errors import InvalidCursor
from holdfast_service.readers.job_history import ALL_STEPS

MAX_NUMBER = 2**53

Cursor = Annotated[
    str | None, Query(max_length=1000, description="`next_cursor` of the previous page")
]
PageSize = Annotated[int, Query(ge=1, le=1000, description="most items of a page")]


def number_of(cursor: Cursor = None) -> int:
    """The number in the cursor of a list whose items are numbered; 0: its begin.

    Raises InvalidCursor.
    """
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 17):
        raise InvalidCursor(f"{cursor[:64]!r} is not a cursor of this list")
    return int(cursor)


def start_of(after: int | None, cursor: str | None, name: str) -> int:
    """The number after which a page starts: `cursor` continues a list, `after` (a parameter called
    `name`) starts it anywhere. Raises ProblemError, InvalidCursor."""
    if after is not None and cursor is not None:
        raise ProblemError(
            422,
            "invalid_parameters",
            f"{name} and cursor exclude each other: a cursor has its own start",
            faults=[{"path": f"query.{name}", "message": "must not be given with a cursor"}],
        )
    return number_of(cursor) if after is None else after


def _after(
    after: Annotated[
        int | None, Query(ge=0, le=MAX_NUMBER, description="only numbers above this")
    ] = None,
    cursor: Cursor = None,
) -> int:
    return start_of(after, cursor, "after")


def _after_step(
    after_step: Annotated[
        int | None, Query(ge=0, le=MAX_NUMBER, description="only steps above this")
    ] = None,
    cursor: Cursor = None,
) -> int:
    return start_of(after_step, cursor, "after_step")


def _after_row(
    after_step: Annotated[
        int | None,
        Query(
            ge=ALL_STEPS,
            le=MAX_NUMBER,
            description="only steps above this; a program may begin with step 0, so -1 is all",
        ),
    ] = None,
    cursor: Cursor = None,
) -> int:
    given = after_step is not None or cursor is not None
    return start_of(after_step, cursor, "after_step") if given else ALL_STEPS


After = Annotated[int, Depends(_after)]
AfterStep = Annotated[int, Depends(_after_step)]
AfterRow = Annotated[int, Depends(_after_row)]
AfterNumber = Annotated[int, Depends(number_of)]
"""The number after which a list begins that only a cursor continues."""
