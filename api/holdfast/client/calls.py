"""Requests of the REST API as values: a request and the parser of its answer, lists in pages,
streams. Pure: `transport` sends them.

A `Call` can be repeated safely: a call that creates something has an idempotency key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, TypeAdapter

from holdfast_service.views.jobs import (
    DigestPage,
    EventPage,
    EventView,
    JobPage,
    JobView,
    LogLineView,
    LogPage,
    MetricPage,
    MetricPoint,
)
from holdfast_service.views.lists import JobRow, JobRowPage

JOBS = "/api/v1/jobs"
NODES = "/api/v1/nodes"
PAGE = 1000
JOBS_PAGE = 50
ROWS_PAGE = 500

C = TypeVar("C")
T = TypeVar("T")
P = TypeVar("P")
Document = Mapping[str, Any] | BaseModel
"""A job spec: a `JobSpec`, or a mapping with the keys of a YAML spec."""


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request, and the parser of its JSON answer."""

    method: str
    path: str
    read: Callable[[Any], T]
    params: Mapping[str, Any] | None = None
    body: Any = None
    headers: Mapping[str, str] | None = None
    content: bytes | None = None
    """Raw bytes to send instead of a `body`."""


@dataclass(frozen=True)
class Pages(Generic[P, T]):
    """A list in pages: the first page, the items of a page, and the page after it."""

    first: Call[P]
    items: Callable[[P], Iterable[T]]
    following: Callable[[P], Call[P] | None]


@dataclass(frozen=True)
class Feed(Generic[T]):
    """A stream of numbered messages that starts after the number `after`."""

    path: str
    read: Callable[[str], T]
    after: int = 0
    params: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class LogQuery:
    """Selects lines of a job's log; the server filters."""

    rank: int | None = None
    attempt: int | None = None
    since: float | None = None
    """Unix seconds."""
    grep: str | None = None
    """A regular expression, in RE2's syntax."""
    level: str | None = None
    """The lowest level: debug, info, warning or error."""

    def params(self) -> dict[str, Any]:
        return asdict(self)


def call(method: str, path: str, answer: type[T], **parts: Any) -> Call[T]:
    """A request with an answer of type `answer`; `parts`: the other fields of the `Call`."""
    return Call(method, path, TypeAdapter(answer).validate_python, **parts)


def get(path: str, answer: type[T], **params: Any) -> Call[T]:
    return call("GET", path, answer, params=params)


def job_path(job_id: str, suffix: str = "") -> str:
    return f"{JOBS}/{quote(job_id, safe='')}{suffix}"


def checkpoint_path(job_id: str, step: int, suffix: str = "") -> str:
    return job_path(job_id, f"/checkpoints/{step}{suffix}")


def node_path(name: str, suffix: str = "") -> str:
    return f"{NODES}/{quote(name, safe='')}{suffix}"


def plain(spec: Document) -> dict[str, Any]:
    """The document to send: of a model only the fields that were set; the server adds defaults."""
    if isinstance(spec, BaseModel):
        return spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return dict(spec)


def jobs(state: Collection[str] | None, name: str | None) -> Pages[JobPage, JobView]:
    def page(cursor: str | None) -> Call[JobPage]:
        return get(JOBS, JobPage, cursor=cursor, limit=JOBS_PAGE, state=_listed(state), name=name)

    return _pages(page, None, lambda found: found.jobs, lambda found: found.next_cursor)


def rows(
    q: str | None, state: Collection[str] | None, owner: str | None, sort: str | None
) -> Pages[JobRowPage, JobRow]:
    """`q`: part of a name, or the start of an id."""

    def page(cursor: str | None) -> Call[JobRowPage]:
        params = {"view": "row", "q": q or None, "state": _listed(state), "owner": owner}
        return get(JOBS, JobRowPage, **params, sort=sort, limit=ROWS_PAGE, cursor=cursor)

    return _pages(page, None, lambda found: found.rows, lambda found: found.next_cursor)


def events(job_id: str, after: int, limit: int) -> Call[EventPage]:
    return get(job_path(job_id, "/events"), EventPage, after=after, limit=limit)


def all_events(job_id: str, after: int) -> Pages[EventPage, EventView]:
    """The stored events, page by page."""
    return _pages(
        lambda last: events(job_id, last, PAGE),
        after,
        lambda found: found.events,
        lambda found: found.last_seq if len(found.events) == PAGE else None,
    )


def event_feed(job_id: str, after: int) -> Feed[EventView]:
    return Feed(job_path(job_id, "/events"), EventView.model_validate_json, after)


def logs(
    job_id: str,
    query: LogQuery,
    after: int,
    limit: int,
    tail: int | None = None,
    before: int | None = None,
) -> Call[LogPage]:
    params = query.params() | {"after": after, "limit": limit, "tail": tail, "before": before}
    return get(job_path(job_id, "/logs"), LogPage, **params)


def all_logs(
    job_id: str, query: LogQuery, after: int = 0, tail: int | None = None
) -> Pages[LogPage, LogLineView]:
    """The stored lines, page by page; with `tail` only that many last lines."""
    if tail is not None:
        return _last_logs(job_id, query, after, tail)
    return _pages(
        lambda last: logs(job_id, query, last, PAGE),
        after,
        lambda found: found.lines,
        lambda found: found.last_line if found.more else None,
    )


def _last_logs(job_id: str, query: LogQuery, after: int, tail: int) -> Pages[LogPage, LogLineView]:
    """Pages backwards; each contains the lines of the pages before it, so the last has all lines.

    The server ends a long search early, and reports where to continue it further back.
    """

    def page(newer: tuple[LogLineView, ...], before: int | None) -> Call[LogPage]:
        def read(answer: Any) -> LogPage:
            found = LogPage.model_validate(answer)
            return found.model_copy(update={"lines": (*found.lines, *newer)})

        missing = tail - len(newer)
        return replace(logs(job_id, query, after, max(1, missing), missing, before), read=read)

    def following(found: LogPage) -> Call[LogPage] | None:
        if found.first_line is None or len(found.lines) >= tail:
            return None
        return page(found.lines, found.first_line)

    return Pages(page((), None), lambda found: () if following(found) else found.lines, following)


def log_feed(job_id: str, query: LogQuery, after: int, tail: int | None) -> Feed[LogLineView]:
    params = query.params() | {"tail": tail}
    return Feed(job_path(job_id, "/logs"), LogLineView.model_validate_json, after, params)


def metrics(
    job_id: str, names: Collection[str] | None, after_step: int
) -> Pages[MetricPage, MetricPoint]:
    path, name = job_path(job_id, "/metrics"), _listed(names)
    return _pages(
        lambda last: get(path, MetricPage, name=name, after_step=last, limit=PAGE),
        after_step,
        lambda found: found.points,
        lambda found: found.last_step if found.more else None,
    )


def thinned_metrics(job_id: str, names: Collection[str] | None, most: int) -> Call[MetricPage]:
    """The whole series in at most `most` points; the extremes of each section are kept."""
    return get(job_path(job_id, "/metrics"), MetricPage, name=_listed(names), points=most)


def digests(job_id: str) -> Pages[DigestPage, tuple[int, str]]:
    return _pages(
        lambda last: get(job_path(job_id, "/digests"), DigestPage, after_step=last),
        0,
        lambda found: found.digests.items(),
        lambda found: found.last_step if found.more else None,
    )


def _pages(
    page: Callable[[C], Call[P]],
    start: C,
    items: Callable[[P], Iterable[T]],
    continue_at: Callable[[P], C | None],
) -> Pages[P, T]:
    """The page at `start`, then each at the place that the page before gives; None: no more."""

    def following(found: P) -> Call[P] | None:
        place = continue_at(found)
        return None if place is None else page(place)

    return Pages(page(start), items, following)


def _listed(values: Collection[str] | None) -> list[str] | None:
    """None for no values: the parameter is left out."""
    return list(values) if values else None
