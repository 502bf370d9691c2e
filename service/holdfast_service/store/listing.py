"""Lists of jobs out of the store: filtered, sorted, counted, page by page.

Filters and counts look at one index (`ix_jobs_search`) and never at a spec, so that a list of
twenty thousand jobs stays quick; only the page's own rows are then read.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, Select, and_, case, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import ColumnElement

from holdfast_service.job_errors import InvalidCursor
from holdfast_service.lifecycle import Desired, State
from holdfast_service.list_order import Sort
from holdfast_service.list_views import JobRow, JobRowPage
from holdfast_service.store import row_figures
from holdfast_service.store.models import Job
from holdfast_service.store.storable import number, text
from holdfast_service.views import WaitingView

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

    def conditions(self) -> list[ColumnElement[bool]]:
        """All but that of the states."""
        found: list[ColumnElement[bool]] = []
        if self.q:
            asked = text(self.q).lower()
            found.append(
                or_(
                    func.lower(Job.name).contains(asked, autoescape=True),
                    func.lower(Job.owner).contains(asked, autoescape=True),
                    Job.id.startswith(asked, autoescape=True),
                )
            )
        if self.owner is not None:
            found.append(Job.owner == text(self.owner))
        return found


async def page(
    session: AsyncSession, filters: Filters, sort: Sort, limit: int, cursor: str | None
) -> JobRowPage:
    """Raises InvalidCursor."""
    conditions = filters.conditions()
    counted = await session.execute(
        select(Job.state, func.count()).where(*conditions).group_by(Job.state)
    )
    counts = {State(state): count for state, count in counted}
    total = sum(
        count for state, count in counts.items() if not filters.states or state in filters.states
    )
    if filters.states:
        conditions.append(Job.state.in_(sorted(filters.states)))
    ids: Select[Any] = select(Job.id, *(key.label("key") for key in _keys(sort))).where(*conditions)
    if cursor is not None:
        ids = ids.where(_after(sort, _from_cursor(cursor, sort)))
    found = (await session.execute(ids.order_by(*_order(sort)).limit(limit + 1))).all()
    shown = found[:limit]
    rows = await read(session, [one.id for one in shown])
    return JobRowPage(
        rows=tuple(rows),
        next_cursor=_to_cursor(sort, shown[-1]) if len(found) > limit else None,
        total=total,
        counts=counts,
    )


async def read(session: AsyncSession, ids: Sequence[str]) -> list[JobRow]:
    """The rows of these jobs, in this order."""
    jobs = await session.execute(select(*SHOWN).where(Job.id.in_(ids)))
    found = {job.id: row(job) for job in jobs}
    return [found[one] for one in ids if one in found]


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
        eta_s=number(row_figures.eta_s(job)),
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


def _order(sort: Sort) -> list[ColumnElement[Any]]:
    return [*_keys(sort), Job.id.desc()]


def _after(sort: Sort, last: tuple[Any, str]) -> ColumnElement[bool]:
    """What comes after the last of a page: its key, and its id."""
    key, job_id = last
    if sort is Sort.CREATED:
        return Job.id < job_id
    column = _keys(sort)[0]
    return or_(column > key, and_(column == key, Job.id < job_id))


def _to_cursor(sort: Sort, last: Row[Any]) -> str:
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
