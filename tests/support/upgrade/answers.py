"""The answers of the REST API about every job, and how they may differ in a later version.

`/verdict` is left out: it consists of sentences, whose wording is not promised. Events are shown as
they are stored, so the first few of a job are enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
from tests.support.service.fake_cluster import FakeCluster

from holdfast.rest.app import create_app
from holdfast.rest.services import services_over
from holdfast_service.job_model.times import rfc3339
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store

NOW = 1_001_000.0
"""When the answers were given; some contain the time that has passed since."""
JOBS = "/api/v1/jobs?limit=100"
_OF_A_JOB = (
    *("", "/attempts", "/incidents", "/events?limit=5", "/metrics?discarded=true", "/digests"),
    *("/logs", "/checkpoints", "/goodput", "/faults", "/ranks", "/timeline"),
)


async def answers(store: Store, settings: Settings) -> dict[str, Any]:
    """Path -> answer. The caller sets the clock to NOW."""
    app = create_app(services_over(store, FakeCluster(), settings))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

        async def read(path: str) -> Any:
            answer = await client.get(path)
            assert answer.status_code == 200, f"{path}: {answer.text}"
            return answer.json()

        jobs = [job["id"] for job in (await read(JOBS))["items"]]
        paths = [f"/api/v1/jobs/{job}{part}" for job in jobs for part in _OF_A_JOB]
        return {path: await read(path) for path in (*paths, "/api/v1/nodes")}


def in_present_shapes(before: dict[str, Any]) -> dict[str, Any]:
    """The answers of version 0.1, as the present API gives them: lists have `items`, and times are
    RFC 3339."""
    return {path: _timed(_as_page(path, answer)) for path, answer in before.items()}


_ITEMS = {
    **{"events": "events", "metrics": "points", "logs": "lines", "nodes": "nodes"},
    "checkpoints": "remote",
}
"""Last part of a path -> the former name of its items."""


def _as_page(path: str, answer: Any) -> Any:
    resource = path.partition("?")[0].rpartition("/")[2]
    if isinstance(answer, list):
        return {"items": answer}
    if resource == "digests":
        digests = answer["digests"].items()
        return {"items": [{"step": int(step), "digest": digest} for step, digest in digests]}
    former = _ITEMS.get(resource)
    if former is None:
        return answer
    rest = {name: value for name, value in answer.items() if name not in (former, "more")}
    return {"items": answer[former], **rest}


def _timed(value: Any, name: str = "") -> Any:
    match value:
        case dict():
            return {key: _timed(item, key) for key, item in value.items()}
        case list():
            return [_timed(item) for item in value]
        case int() | float() if name in _TIMES or name.endswith("_at"):
            return rfc3339(value)
    return value


_TIMES = frozenset({"at", "since", "until", "first_seen", "last_seen"})


def losses(before: Any, now: Any, place: str = "") -> Iterator[str]:
    """What of an answer is missing or different now. Further fields are no loss."""
    match before, now:
        case dict(), dict():
            for name, value in before.items():
                if name in now:
                    yield from losses(value, now[name], f"{place}.{name}")
                else:
                    yield f"{place}.{name} is missing"
        case list(), list() if place.endswith(".names"):  # of series: a further one is no loss
            yield from (f"{place} lacks {name}" for name in before if name not in now)
        case list(), list() if len(before) == len(now):
            for index, (value, other) in enumerate(zip(before, now, strict=True)):
                yield from losses(value, other, f"{place}[{index}]")
        case _:
            if before != now:
                yield f"{place}: {before!r} became {now!r}"
