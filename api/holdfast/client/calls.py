"""Every request of the REST API as a value: the request, and the parser of the answer. Pure.

`Client` and `AsyncClient` send the same values, so neither knows a path, a parameter or a page's
cursor. A `Call` can be repeated safely: a call that creates something has an idempotency key.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, TypeAdapter

from holdfast.errors import unfinished
from holdfast.schemas import Readiness
from holdfast_service.views.goodput import GoodputView
from holdfast_service.views.jobs import (
    AttemptView,
    CheckpointsView,
    CheckpointView,
    CodeView,
    DigestPage,
    EventPage,
    EventView,
    FaultView,
    IncidentView,
    JobPage,
    JobView,
    LogLineView,
    LogPage,
    MetricPage,
    MetricPoint,
    NodePage,
    NodeView,
    VerificationView,
)
from holdfast_service.views.lists import ClusterView, JobRow, JobRowPage, SpecDifferenceView
from holdfast_service.views.ranks import RanksView
from holdfast_service.views.timeline import TimelineView, VerdictView

JOBS = "/api/v1/jobs"
NODES = "/api/v1/nodes"
CODE = "/api/v1/code"
PAGE = 1000
JOBS_PAGE = 50
ROWS_PAGE = 500

T = TypeVar("T")
P = TypeVar("P")
M = TypeVar("M", bound=BaseModel)
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
        names = ("rank", "attempt", "since", "grep", "level")
        return {name: getattr(self, name) for name in names}


def submit(spec: Document, idempotency_key: str | None) -> Call[JobView]:
    return _post(JOBS, JobView, body=plain(spec), headers=_key(idempotency_key))


def send_code(package: bytes) -> Call[CodeView]:
    headers = {"Content-Type": "application/zip"}
    return Call("POST", CODE, CodeView.model_validate, headers=headers, content=package)


def validate(spec: Document) -> Call[dict[str, Any]]:
    def resolved(answer: Any) -> dict[str, Any]:
        return dict(answer["spec"])

    return Call("POST", f"{JOBS}/validate", resolved, body=plain(spec))


def jobs(state: Collection[str] | None, name: str | None) -> Pages[JobPage, JobView]:
    def page(cursor: str | None) -> Call[JobPage]:
        params = {
            "cursor": cursor,
            "limit": JOBS_PAGE,
            "state": list(state) if state else None,
            "name": name,
        }
        return _get(JOBS, JobPage, params)

    return Pages(
        page(None),
        lambda found: found.jobs,
        lambda found: page(found.next_cursor) if found.next_cursor else None,
    )


def jobs_of(ids: Sequence[str]) -> Call[JobPage]:
    """The jobs with these ids, at most JOBS_PAGE."""
    return _get(JOBS, JobPage, {"id": list(ids), "limit": JOBS_PAGE})


def rows(
    q: str | None,
    state: Collection[str] | None,
    owner: str | None,
    sort: str | None,
    limit: int = ROWS_PAGE,
) -> Pages[JobRowPage, JobRow]:
    """`q`: part of a name, or the start of an id."""

    def page(cursor: str | None) -> Call[JobRowPage]:
        params = {
            "view": "row",
            "q": q or None,
            "state": list(state) if state else None,
            "owner": owner,
            "sort": sort,
            "limit": limit,
            "cursor": cursor,
        }
        return _get(JOBS, JobRowPage, params)

    return Pages(
        page(None),
        lambda found: found.rows,
        lambda found: page(found.next_cursor) if found.next_cursor else None,
    )


def job(job_id: str) -> Call[JobView]:
    return _get(_path(job_id), JobView)


def cancel(job_id: str, now: bool) -> Call[JobView]:
    return _post(_path(job_id, "/cancel"), JobView, params={"now": True} if now else None)


def pause(job_id: str) -> Call[JobView]:
    return _post(_path(job_id, "/pause"), JobView)


def resume(job_id: str) -> Call[JobView]:
    return _post(_path(job_id, "/resume"), JobView)


def attempts(job_id: str) -> Call[list[AttemptView]]:
    return Call("GET", _path(job_id, "/attempts"), TypeAdapter(list[AttemptView]).validate_python)


def incidents(job_id: str) -> Call[list[IncidentView]]:
    return Call("GET", _path(job_id, "/incidents"), TypeAdapter(list[IncidentView]).validate_python)


def inject(job_id: str, kind: str, idempotency_key: str | None, parameters: Any) -> Call[FaultView]:
    body = {"kind": str(kind), **parameters}
    return _post(_path(job_id, "/faults"), FaultView, body=body, headers=_key(idempotency_key))


def faults(job_id: str) -> Call[list[FaultView]]:
    return Call("GET", _path(job_id, "/faults"), TypeAdapter(list[FaultView]).validate_python)


def goodput(job_id: str) -> Call[GoodputView]:
    return _get(_path(job_id, "/goodput"), GoodputView)


def verdict(job_id: str) -> Call[VerdictView]:
    return _get(_path(job_id, "/verdict"), VerdictView)


def timeline(job_id: str) -> Call[TimelineView]:
    return _get(_path(job_id, "/timeline"), TimelineView)


def ranks(job_id: str) -> Call[RanksView]:
    return _get(_path(job_id, "/ranks"), RanksView)


def difference(job_id: str, against: str) -> Call[list[SpecDifferenceView]]:
    read = TypeAdapter(list[SpecDifferenceView]).validate_python
    return Call("GET", _path(job_id, "/spec/diff"), read, {"against": against})


def cluster() -> Call[ClusterView]:
    return _get("/api/v1/cluster", ClusterView)


def checkpoints(job_id: str) -> Call[CheckpointsView]:
    return _get(_path(job_id, "/checkpoints"), CheckpointsView)


def verification(job_id: str, step: int) -> tuple[str, str]:
    """Method and path; the lines of the answer are parsed by `verified`."""
    return "POST", _path(job_id, f"/checkpoints/{step}/verify")


def verified(line: str) -> VerificationView:
    """The progress in one line. Raises ServerError if the verification could not be finished."""
    progress = VerificationView.model_validate_json(line)
    if progress.problem is not None:
        raise unfinished(progress.problem)
    return progress


def pin(job_id: str, step: int) -> Call[CheckpointView]:
    return Call("PUT", _path(job_id, f"/checkpoints/{step}/pin"), CheckpointView.model_validate)


def unpin(job_id: str, step: int) -> Call[CheckpointView]:
    return Call("DELETE", _path(job_id, f"/checkpoints/{step}/pin"), CheckpointView.model_validate)


def remove_checkpoint(job_id: str, step: int) -> Call[None]:
    return Call("DELETE", _path(job_id, f"/checkpoints/{step}"), lambda _answer: None)


def export(job_id: str, step: int, hugging_face: bool) -> tuple[str, dict[str, Any]]:
    """Path and parameters of the exported file."""
    params = {"format": "safetensors", "names": "hf" if hugging_face else "own"}
    return _path(job_id, f"/checkpoints/{step}/export"), params


def nodes() -> Call[tuple[NodeView, ...]]:
    return Call("GET", NODES, lambda answer: NodePage.model_validate(answer).nodes)


def node(name: str) -> Call[NodeView]:
    return _get(_node(name), NodeView)


def cordon(name: str, reason: str, until: float | None) -> Call[NodeView]:
    return _post(_node(name, "/cordon"), NodeView, body={"reason": reason, "until": until})


def uncordon(name: str) -> Call[NodeView]:
    return _post(_node(name, "/uncordon"), NodeView)


def events(job_id: str, after: int, limit: int) -> Call[EventPage]:
    return _get(_path(job_id, "/events"), EventPage, {"after": after, "limit": limit})


def all_events(job_id: str, after: int) -> Pages[EventPage, EventView]:
    """The stored events, page by page."""

    def following(page: EventPage) -> Call[EventPage] | None:
        return events(job_id, page.last_seq, PAGE) if len(page.events) == PAGE else None

    return Pages(events(job_id, after, PAGE), lambda page: page.events, following)


def event_feed(job_id: str, after: int) -> Feed[EventView]:
    return Feed(_path(job_id, "/events"), EventView.model_validate_json, after)


def logs(
    job_id: str,
    query: LogQuery,
    after: int,
    limit: int,
    tail: int | None = None,
    before: int | None = None,
) -> Call[LogPage]:
    params = query.params() | {"after": after, "limit": limit, "tail": tail, "before": before}
    return _get(_path(job_id, "/logs"), LogPage, params)


def all_logs(
    job_id: str, query: LogQuery, after: int = 0, tail: int | None = None
) -> Pages[LogPage, LogLineView]:
    """The stored lines, page by page; with `tail` only that many last lines."""

    if tail is not None:
        return _last_logs(job_id, query, after, tail)

    def following(page: LogPage) -> Call[LogPage] | None:
        return logs(job_id, query, page.last_line, PAGE) if page.more else None

    return Pages(logs(job_id, query, after, PAGE), lambda page: page.lines, following)


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
    return Feed(_path(job_id, "/logs"), LogLineView.model_validate_json, after, params)


def metrics(
    job_id: str, names: Collection[str] | None, after_step: int
) -> Pages[MetricPage, MetricPoint]:
    def page(after: int) -> Call[MetricPage]:
        params = {"name": list(names) if names else None, "after_step": after, "limit": PAGE}
        return _get(_path(job_id, "/metrics"), MetricPage, params)

    return Pages(
        page(after_step),
        lambda found: found.points,
        lambda found: page(found.last_step) if found.more else None,
    )


def thinned_metrics(job_id: str, names: Collection[str] | None, most: int) -> Call[MetricPage]:
    """The whole series in at most `most` points; the extremes of each section are kept."""
    params = {"name": list(names) if names else None, "points": most}
    return _get(_path(job_id, "/metrics"), MetricPage, params)


def digests(job_id: str) -> Pages[DigestPage, tuple[int, str]]:
    def page(after: int) -> Call[DigestPage]:
        return _get(_path(job_id, "/digests"), DigestPage, {"after_step": after})

    return Pages(
        page(0),
        lambda found: found.digests.items(),
        lambda found: page(found.last_step) if found.more else None,
    )


def ready() -> Call[Readiness]:
    return _get("/readyz", Readiness)


def plain(spec: Document) -> dict[str, Any]:
    """The document to send: of a model only the fields that were set; the server adds defaults."""
    if isinstance(spec, BaseModel):
        return spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return dict(spec)


def _get(path: str, model: type[M], params: Mapping[str, Any] | None = None) -> Call[M]:
    return Call("GET", path, model.model_validate, params)


def _post(
    path: str,
    model: type[M],
    *,
    params: Mapping[str, Any] | None = None,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Call[M]:
    return Call("POST", path, model.model_validate, params, body, headers)


def _key(given: str | None) -> dict[str, str]:
    return {"Idempotency-Key": given or str(uuid.uuid4())}


def _path(job_id: str, suffix: str = "") -> str:
    return f"{JOBS}/{quote(job_id, safe='')}{suffix}"


def _node(name: str, suffix: str = "") -> str:
    return f"{NODES}/{quote(name, safe='')}{suffix}"
