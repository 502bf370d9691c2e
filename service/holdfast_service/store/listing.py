"""Job lists: filtered, sorted, counted and paged in the database.

Filters and counts use one index (`ix_jobs_search`) and never a spec, so a list of twenty thousand
jobs stays fast; full rows are read only for the requested page.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import Integer, String, and_, bindparam, case, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import ColumnElement
from sqlalchemy.sql.functions import FunctionElement

from holdfast_service.errors import InvalidCursor
from holdfast_service.job_model.goodput import is_settled
from holdfast_service.job_model.lifecycle import Desired, State
from holdfast_service.job_model.sort_order import Sort
from holdfast_service.store import job_row_stats
from holdfast_service.store.json_safe import number, text
from holdfast_service.store.models import JobRecord
from holdfast_service.store.statement import AnySelect, Statement
from holdfast_service.views.jobs import WaitingView
from holdfast_service.views.lists import JobRow
from holdfast_service.views.pages import JobPage

STATES = (
    State.RECOVERING,
    State.RESIZING,
    State.STARTING,
    State.RUNNING,
    State.PAUSING,
    State.CANCELLING,
    State.QUEUED,
    State.PAUSED,
    State.FAILED,
    State.CANCELLED,
    State.SUCCEEDED,
)
"""Sort order of the states: those that need attention come first."""
ROW_COLUMNS = (
    JobRecord.id,
    JobRecord.name,
    JobRecord.owner,
    JobRecord.state,
    JobRecord.desired,
    JobRecord.step,
    JobRecord.steps,
    JobRecord.attempt,
    JobRecord.incidents,
    JobRecord.loss,
    JobRecord.tokens_per_second,
    JobRecord.goodput,
    JobRecord.productive_s,
    JobRecord.starting_s,
    JobRecord.step_s,
    JobRecord.waiting,
    JobRecord.outcome_code,
    JobRecord.created_at,
    JobRecord.started_at,
    JobRecord.ended_at,
    JobRecord.event_seq,
    JobRecord.changed,
)
"""The columns of a list row."""


@dataclass(frozen=True)
class Filters:
    """`q`: part of a name or owner, or the start or end of an id; not case-sensitive. `owner` and
    `name` match exactly. `ids`: only these jobs; empty: any."""

    q: str | None = None
    owner: str | None = None
    name: str | None = None
    ids: frozenset[str] = frozenset()
    states: frozenset[State] = frozenset()
    not_desired: Desired | None = None
    """Only jobs of which a state other than this one is desired."""

    def values(self) -> dict[str, object]:
        """Condition name -> its parameter, escaped as the condition expects."""
        found: dict[str, object] = {}
        if self.q:
            pattern = text(self.q).lower()
            for special in (_ESCAPE, "%", "_"):
                pattern = pattern.replace(special, _ESCAPE + special)
            found["part"] = pattern
        if self.owner is not None:
            found["owner"] = text(self.owner)
        if self.name is not None:
            found["name"] = text(self.name)
        if self.not_desired is not None:
            found["not_desired"] = self.not_desired.value
        if self.ids:
            found["ids"] = sorted(map(text, self.ids))
        return found


class _Lower(FunctionElement[str]):
    """A column in lower case, for a comparison with LIKE."""

    name = "lower"
    type = String()
    inherit_cache = True


@compiles(_Lower)
def _lower(element: _Lower, compiler: Any, **options: Any) -> str:
    return f"lower({compiler.process(element.clauses, **options)})"


@compiles(_Lower, "sqlite")
def _unchanged(element: _Lower, compiler: Any, **options: Any) -> str:
    """SQLite's LIKE ignores case by itself and takes a third of the time without `lower`."""
    return str(compiler.process(element.clauses, **options))


_ESCAPE = "/"
_CONDITIONS: dict[str, ColumnElement[bool]] = {
    "part": or_(
        _Lower(JobRecord.name).contains(bindparam("part"), escape=_ESCAPE),
        _Lower(JobRecord.owner).contains(bindparam("part"), escape=_ESCAPE),
        JobRecord.id.startswith(bindparam("part"), escape=_ESCAPE),
        JobRecord.id.endswith(bindparam("part"), escape=_ESCAPE),
    ),
    "owner": JobRecord.owner == bindparam("owner"),
    "name": JobRecord.name == bindparam("name"),
    "not_desired": JobRecord.desired != bindparam("not_desired"),
    "ids": JobRecord.id.in_(bindparam("ids", expanding=True)),
}


async def page(
    session: AsyncSession, filters: Filters, sort: Sort, limit: int, cursor: str | None
) -> JobPage:
    """One page of job rows, with the total and the counts by state. Raises InvalidCursor."""
    values = filters.values()
    condition_names = tuple(values)
    counted = await _count_by_state(condition_names).all(session, **values)
    counts = {State(state): count for state, count in counted}
    total = sum(
        count for state, count in counts.items() if not filters.states or state in filters.states
    )
    last: dict[str, Any] = {}
    if cursor is not None:
        key, job_id = _from_cursor(cursor, sort)
        last = {"last_id": job_id} if sort is Sort.CREATED else {"last": key, "last_id": job_id}
    statement = _select_page(condition_names, filters.states, sort, bool(last))
    found = await statement.all(session, **values, **last, most=limit + 1)
    shown = found[:limit]
    return JobPage(
        items=tuple(map(row, shown)),
        next_cursor=_to_cursor(sort, shown[-1]) if len(found) > limit else None,
        total=total,
        counts=counts,
    )


def row(job: Any) -> JobRow:
    """The list row of a JobRecord, or of a result row with the columns in `ROW_COLUMNS`."""
    ended = State(job.state).terminal
    return JobRow.from_attributes(
        job,
        steps=job.steps or None,
        loss=number(job.loss),
        tokens_per_second=number(job.tokens_per_second),
        goodput=(goodput := number(job.goodput)),
        goodput_settled=goodput is not None
        and bool(is_settled(goodput, job.productive_s, job.starting_s)),
        eta_s=number(job_row_stats.eta_s(job)),
        waiting=WaitingView(**job.waiting) if job.waiting and not ended else None,
    )


_STATE_ORDER: ColumnElement[int] = case(
    {state.value: place for place, state in enumerate(STATES)},
    value=JobRecord.state,
    else_=len(STATES),
)
_GOODPUT: ColumnElement[float] = case(  # of a job that has just started: after every other
    (JobRecord.goodput.is_(None), 3.0),
    (
        is_settled(JobRecord.goodput, JobRecord.productive_s, JobRecord.starting_s),
        JobRecord.goodput,
    ),
    else_=2.0,
)


def _sort_keys(sort: Sort) -> list[ColumnElement[Any]]:
    match sort:
        case Sort.CREATED:
            return []
        case Sort.NAME:
            return [JobRecord.name.expression]
        case Sort.STATE:
            return [_STATE_ORDER]
        case Sort.GOODPUT:
            return [_GOODPUT]


@lru_cache
def _count_by_state(condition_names: tuple[str, ...]) -> Statement:
    """Counts the jobs of each state that match these conditions."""
    conditions = [_CONDITIONS[name] for name in condition_names]
    return Statement(
        select(JobRecord.state, func.count()).where(*conditions).group_by(JobRecord.state)
    )


@lru_cache(1024)
def _select_page(
    condition_names: tuple[str, ...], states: frozenset[State], sort: Sort, after: bool
) -> Statement:
    """Selects the first `most` rows that match these conditions; with `after`, those that follow
    the last row of the previous page."""
    keys = _sort_keys(sort)
    ids: AnySelect = select(JobRecord.id, *(key.label("key") for key in keys))
    ids = ids.where(*(_CONDITIONS[name] for name in condition_names))
    if states:
        ids = ids.where(JobRecord.state.in_(sorted(states)))
    if after:
        earlier = JobRecord.id < bindparam("last_id")
        for key in keys:
            last = bindparam("last", type_=key.type)
            earlier = or_(key > last, and_(key == last, earlier))
        ids = ids.where(earlier)
    ids = ids.order_by(*keys, JobRecord.id.desc()).limit(bindparam("most", type_=Integer))
    chosen = ids.subquery()
    shown = [*chosen.c][1:]
    return Statement(
        select(*ROW_COLUMNS, *shown)
        .join(chosen, chosen.c.id == JobRecord.id)
        .order_by(*shown, JobRecord.id.desc())
    )


def _to_cursor(sort: Sort, last: Any) -> str:
    key = None if sort is Sort.CREATED else last.key
    encoded = json.dumps([sort, key, last.id], separators=(",", ":"))
    return base64.urlsafe_b64encode(encoded.encode()).decode().rstrip("=")


_KEY_TYPES: dict[Sort, Collection[type]] = {
    Sort.CREATED: (type(None),),
    Sort.NAME: (str,),
    Sort.STATE: (int,),
    Sort.GOODPUT: (float,),
}


def _from_cursor(cursor: str, sort: Sort) -> tuple[Any, str]:
    try:
        decoded = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        cursor_sort, key, job_id = decoded
        if cursor_sort != sort or type(key) not in _KEY_TYPES[sort] or not isinstance(job_id, str):
            raise ValueError(cursor_sort)
        if isinstance(key, int) and not 0 <= key <= len(STATES):
            raise ValueError(key)
        job_id.encode()
        if isinstance(key, str):
            key.encode()
    except (ValueError, TypeError, binascii.Error, RecursionError) as error:
        shown = cursor[:64]
        raise InvalidCursor(f"{shown!r} is not a cursor of a list sorted by {sort}") from error
    return (text(key) if isinstance(key, str) else key), text(job_id)
