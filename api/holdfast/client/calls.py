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

from holdfast_service.errors import OperationCancelled, from_problem
from holdfast_service.job_model.operations import (
    ExportedWeights,
    OperationState,
    ParameterNames,
)
from holdfast_service.job_model.times import rfc3339
from holdfast_service.views.attempts import AttemptView
from holdfast_service.views.history import DigestView, EventView, LogLineView, MetricPoint
from holdfast_service.views.incidents import FaultView, IncidentView
from holdfast_service.views.lists import JobRow
from holdfast_service.views.operations import OperationView
from holdfast_service.views.pages import (
    AttemptPage,
    DigestPage,
    EventPage,
    FaultPage,
    IncidentPage,
    JobPage,
    LogPage,
    MetricPage,
)

JOBS = "/api/v1/jobs"
NODES = "/api/v1/nodes"
OPERATIONS = "/api/v1/operations"
OPERATION_PAUSES_S = (0.1, 2.0)
"""The first and the longest between two looks at an operation."""
PAGE = 1000
JOBS_PAGE = 500

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
    timeout_s: float | None = None
    """The longest silence of the server before it answers; None: that of the client."""


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
        return asdict(self) | {"since": None if self.since is None else rfc3339(self.since)}


def call(method: str, path: str, answer: type[T], **parts: Any) -> Call[T]:
    """A request with an answer of type `answer`; `parts`: the other fields of the `Call`."""
    return Call(method, path, TypeAdapter(answer).validate_python, **parts)


def get(path: str, answer: type[T], **params: Any) -> Call[T]:
    return call("GET", path, answer, params=params)


def job_path(job_id: str, suffix: str = "") -> str:
    return f"{JOBS}/{quote(job_id, safe='')}{suffix}"


def checkpoint_path(job_id: str, step: int, suffix: str = "") -> str:
    return job_path(job_id, f"/checkpoints/{step}{suffix}")


def operation_path(operation_id: str, suffix: str = "") -> str:
    return f"{OPERATIONS}/{quote(operation_id, safe='')}{suffix}"


def verification(job_id: str, step: int) -> Call[OperationView]:
    path = checkpoint_path(job_id, step, "/verify")
    return Call("POST", path, OperationView.model_validate)


def export(job_id: str, step: int, *, hugging_face: bool, average: bool) -> Call[OperationView]:
    names = ParameterNames.HUGGING_FACE if hugging_face else ParameterNames.OWN
    weights = ExportedWeights.AVERAGE if average else ExportedWeights.TRAINED
    path = checkpoint_path(job_id, step, "/export")
    params = {"format": "safetensors", "names": names.value, "weights": weights.value}
    return Call("POST", path, OperationView.model_validate, params=params)


def raise_for_state(operation: OperationView) -> None:
    """Raises the error of an operation that failed, OperationCancelled."""
    match operation.state:
        case OperationState.FAILED:
            raise from_problem(operation.error or {})
        case OperationState.CANCELLED:
            raise OperationCancelled(f"operation {operation.id} was cancelled")


def node_path(name: str, suffix: str = "") -> str:
    return f"{NODES}/{quote(name, safe='')}{suffix}"


def plain(spec: Document) -> dict[str, Any]:
    """The document to send: of a model only the fields that were set; the server adds defaults."""
    if isinstance(spec, BaseModel):
        return spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return dict(spec)


def jobs(
    q: str | None = None,
    *,
    name: str | None = None,
    owner: str | None = None,
    state: Collection[str] | None = None,
    sort: str | None = None,
) -> Pages[JobPage, JobRow]:
    """`q`: part of a name or owner, or the start or end of an id."""
    return _pages(
        JOBS,
        JobPage,
        q=q or None,
        name=name,
        owner=owner,
        state=_listed(state),
        sort=sort,
        limit=JOBS_PAGE,
    )


def attempts(job_id: str) -> Pages[AttemptPage, AttemptView]:
    return _pages(job_path(job_id, "/attempts"), AttemptPage)


def incidents(job_id: str) -> Pages[IncidentPage, IncidentView]:
    return _pages(job_path(job_id, "/incidents"), IncidentPage)


def faults(job_id: str) -> Pages[FaultPage, FaultView]:
    return _pages(job_path(job_id, "/faults"), FaultPage)


def events(job_id: str, after: int, limit: int) -> Call[EventPage]:
    return get(job_path(job_id, "/events"), EventPage, after=after, limit=limit)


def all_events(job_id: str, after: int) -> Pages[EventPage, EventView]:
    """The stored events, page by page."""
    return _pages(job_path(job_id, "/events"), EventPage, start={"after": after}, limit=PAGE)


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
    path = job_path(job_id, "/logs")
    return _pages(path, LogPage, start={"after": after}, limit=PAGE, **query.params())


def _last_logs(job_id: str, query: LogQuery, after: int, tail: int) -> Pages[LogPage, LogLineView]:
    """Pages backwards; each contains the lines of the pages before it, so the last has all lines.

    The server ends a long search early, and reports where to continue it further back.
    """

    def page(newer: tuple[LogLineView, ...], before: int | None) -> Call[LogPage]:
        def read(answer: Any) -> LogPage:
            found = LogPage.model_validate(answer)
            return found.model_copy(update={"items": (*found.items, *newer)})

        missing = tail - len(newer)
        return replace(logs(job_id, query, after, max(1, missing), missing, before), read=read)

    def following(found: LogPage) -> Call[LogPage] | None:
        if found.first_line is None or len(found.items) >= tail:
            return None
        return page(found.items, found.first_line)

    return Pages(page((), None), lambda found: () if following(found) else found.items, following)


def log_feed(job_id: str, query: LogQuery, after: int, tail: int | None) -> Feed[LogLineView]:
    params = query.params() | {"tail": tail}
    return Feed(job_path(job_id, "/logs"), LogLineView.model_validate_json, after, params)


def metrics(
    job_id: str, names: Collection[str] | None, after_step: int | None
) -> Pages[MetricPage, MetricPoint]:
    path, start = job_path(job_id, "/metrics"), {"after_step": after_step}
    return _pages(path, MetricPage, start=start, name=_listed(names), limit=PAGE)


def thinned_metrics(job_id: str, names: Collection[str] | None, most: int) -> Call[MetricPage]:
    """The whole series in at most `most` points; the extremes of each section are kept."""
    return get(job_path(job_id, "/metrics"), MetricPage, name=_listed(names), points=most)


def digests(job_id: str) -> Pages[DigestPage, DigestView]:
    return _pages(job_path(job_id, "/digests"), DigestPage)


def _pages(
    path: str, answer: type[P], *, start: Mapping[str, Any] | None = None, **params: Any
) -> Pages[P, Any]:
    """A list of `items`: the page with the parameters of `start`, then each at the cursor of the
    page before."""

    def following(found: Any) -> Call[P] | None:
        if found.next_cursor is None:
            return None
        return get(path, answer, **params, cursor=found.next_cursor)

    def items(found: Any) -> Iterable[Any]:
        listed: Iterable[Any] = found.items
        return listed

    return Pages(get(path, answer, **params, **(start or {})), items, following)


def _listed(values: Collection[str] | None) -> list[str] | None:
    """The values as a list, or None if there are none: the parameter is then left out."""
    return list(values) if values else None
