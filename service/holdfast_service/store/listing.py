"""Lists of jobs out of the store: filtered, sorted, counted, page by page.

Filters and counts look at one index (`ix_jobs_search`) and never at a spec, so that a list of
twenty thousand jobs stays quick; only the page's own rows are then read.
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

from holdfast_service.job_model.job_errors import InvalidCursor
from holdfast_service.job_model.lifecycle import Desired, State
from holdfast_service.job_model.sort_order import Sort
from holdfast_service.store import job_row_stats
from holdfast_service.store.json_safe import number, text
from holdfast_service.store.models import Job
from holdfast_service.store.statement import AnySelect, Statement
from holdfast_service.views.jobs import WaitingView
from holdfast_service.views.lists import JobRow, JobRowPage

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
"""What needs looking at first."""
SHOWN = (
    Job.id,
    Job.name,
    Job.owner,
    Job.state,
    Job.desired,
    Job.step,
    Job.steps,
    Job.attempt,
    Job.incidents,
    Job.loss,
    Job.tokens_per_second,
    Job.goodput,
    Job.step_s,
    Job.waiting,
    Job.outcome_code,
    Job.created_at,
    Job.started_at,
    Job.ended_at,
    Job.event_seq,
    Job.changed,
)
"""The columns that a row is made of."""


@dataclass(frozen=True)
class Filters:
    """`q`: part of a name or of an owner, or the beginning of an id, in any case of letters."""

    q: str | None = None
    owner: str | None = None
    states: frozenset[State] = frozenset()

    def values(self) -> dict[str, str]:
        """Condition -> the word that it compares with, as it takes it."""
        found = {}
        if self.q:
            asked = text(self.q).lower()
            for special in (_ESCAPE, "%", "_"):
                asked = asked.replace(special, _ESCAPE + special)
            found["part"] = asked
        if self.owner is not None:
            found["owner"] = text(self.owner)
        return found


class _Lower(FunctionElement[str]):
    """A column in lower case, to be compared by LIKE."""

    name = "lower"
    type = String()
    inherit_cache = True


@compiles(_Lower)
def _lower(element: _Lower, compiler: Any, **how: Any) -> str:
    return f"lower({compiler.process(element.clauses, **how)})"


@compiles(_Lower, "sqlite")
def _as_it_is(element: _Lower, compiler: Any, **how: Any) -> str:
    """SQLite's LIKE does not see the case, and takes a third of the time without `lower`."""
    return str(compiler.process(element.clauses, **how))


_ESCAPE = "/"
_CONDITIONS: dict[str, ColumnElement[bool]] = {
    "part": or_(
        _Lower(Job.name).contains(bindparam("part"), escape=_ESCAPE),
        _Lower(Job.owner).contains(bindparam("part"), escape=_ESCAPE),
        Job.id.startswith(bindparam("part"), escape=_ESCAPE),
    ),
    "owner": Job.owner == bindparam("owner"),
}


async def page(
    session: AsyncSession, filters: Filters, sort: Sort, limit: int, cursor: str | None
) -> JobRowPage:
    """Raises InvalidCursor."""
    values = filters.values()
    words = tuple(values)
    counted = await _counting(words).all(session, **values)
    counts = {State(state): count for state, count in counted}
    total = sum(
        count for state, count in counts.items() if not filters.states or state in filters.states
    )
    last: dict[str, Any] = {}
    if cursor is not None:
        key, job_id = _from_cursor(cursor, sort)
        last = {"last_id": job_id} if sort is Sort.CREATED else {"last": key, "last_id": job_id}
    wanted = _paging(words, filters.states, sort, bool(last))
    found = await wanted.all(session, **values, **last, most=limit + 1)
    shown = found[:limit]
    return JobRowPage(
        rows=tuple(map(row, shown)),
        next_cursor=_to_cursor(sort, shown[-1]) if len(found) > limit else None,
        total=total,
        counts=counts,
    )


def row(job: Any) -> JobRow:
    """Of a job, or of a result with the columns in SHOWN."""
    state = State(job.state)
    return JobRow(
        id=job.id,
        name=job.name,
        owner=job.owner,
        state=state,
        desired=Desired(job.desired),
        step=job.step,
        steps=job.steps,
        attempt=job.attempt,
        incidents=job.incidents,
        loss=number(job.loss),
        tokens_per_second=number(job.tokens_per_second),
        goodput=number(job.goodput),
        eta_s=number(job_row_stats.eta_s(job)),
        waiting=WaitingView(**job.waiting) if job.waiting and not state.terminal else None,
        outcome_code=job.outcome_code,
        created_at=job.created_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        event_seq=job.event_seq,
    )


_STATE_ORDER: ColumnElement[int] = case(
    {state.value: place for place, state in enumerate(STATES)}, value=Job.state, else_=len(STATES)
)
_GOODPUT: ColumnElement[float] = func.coalesce(Job.goodput, 2.0)  # beyond every goodput


def _keys(sort: Sort) -> list[ColumnElement[Any]]:
    match sort:
        case Sort.CREATED:
            return []
        case Sort.NAME:
            return [Job.name.expression]
        case Sort.STATE:
            return [_STATE_ORDER]
        case Sort.GOODPUT:
            return [_GOODPUT]


@lru_cache
def _counting(words: tuple[str, ...]) -> Statement:
    """How many jobs of each state fulfil these conditions."""
    conditions = [_CONDITIONS[word] for word in words]
    return Statement(select(Job.state, func.count()).where(*conditions).group_by(Job.state))


@lru_cache(1024)
def _paging(words: tuple[str, ...], states: frozenset[State], sort: Sort, after: bool) -> Statement:
    """The `most` first rows that fulfil these conditions, or those `after` the last of a page."""
    keys = _keys(sort)
    ids: AnySelect = select(Job.id, *(key.label("key") for key in keys))
    ids = ids.where(*(_CONDITIONS[word] for word in words))
    if states:
        ids = ids.where(Job.state.in_(sorted(states)))
    if after:
        earlier = Job.id < bindparam("last_id")
        for key in keys:
            last = bindparam("last", type_=key.type)
            earlier = or_(key > last, and_(key == last, earlier))
        ids = ids.where(earlier)
    ids = ids.order_by(*keys, Job.id.desc()).limit(bindparam("most", type_=Integer))
    chosen = ids.subquery()
    shown = [*chosen.c][1:]
    return Statement(
        select(*SHOWN, *shown).join(chosen, chosen.c.id == Job.id).order_by(*shown, Job.id.desc())
    )


def _to_cursor(sort: Sort, last: Any) -> str:
    key = None if sort is Sort.CREATED else last.key
    told = json.dumps([sort, key, last.id], separators=(",", ":"))
    return base64.urlsafe_b64encode(told.encode()).decode().rstrip("=")


_KEY_TYPES: dict[Sort, Collection[type]] = {
    Sort.CREATED: (type(None),),
    Sort.NAME: (str,),
    Sort.STATE: (int,),
    Sort.GOODPUT: (float,),
}


def _from_cursor(cursor: str, sort: Sort) -> tuple[Any, str]:
    try:
        told = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        of, key, job_id = told
        if of != sort or type(key) not in _KEY_TYPES[sort] or not isinstance(job_id, str):
            raise ValueError(of)
        if isinstance(key, int) and not 0 <= key <= len(STATES):
            raise ValueError(key)
        job_id.encode()
        if isinstance(key, str):
            key.encode()
    except (ValueError, TypeError, binascii.Error, RecursionError) as error:
        shown = cursor[:64]
        raise InvalidCursor(f"{shown!r} is no cursor of a list sorted by {sort}") from error
    return (text(key) if isinstance(key, str) else key), text(job_id)
