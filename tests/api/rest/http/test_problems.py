"""Every error response is a problem with a stable code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs
from tests.support.service.live_server import SPEC, live_server
from tests.support.waiting import DEADLINE_S

MISSING = "01a1facd-0000-7000-8000-000000000000"
JSON = {"Content-Type": "application/json"}


def check(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert problem["code"] == code
    assert problem["status"] == status
    assert problem["type"] == f"urn:holdfast:problem:{code}"
    assert problem["title"]
    assert problem["instance"] == response.request.url.path
    return problem


def test_an_invalid_spec_names_every_fault_with_its_path(http: httpx.Client) -> None:
    spec = {**SPEC, "parallel": {"dp_shard": 2, "tp": 3}, "traim": {}}
    problem = check(http.post("/api/v1/jobs", json=spec), 422, "invalid_spec")
    paths = {fault["path"] for fault in problem["faults"]}
    assert {"parallel.tp", "traim"} <= paths
    assert "train" in next(f["message"] for f in problem["faults"] if f["path"] == "traim")
    assert http.get("/api/v1/jobs").json()["items"] == []


@pytest.mark.parametrize(
    "part",
    ["", "/attempts", "/incidents", "/events", "/metrics", "/logs", "/checkpoints", "/digests"],
)
def test_an_unknown_job_is_not_found(http: httpx.Client, part: str) -> None:
    kinds = ("application/json", *(["text/event-stream"] if part in ("/events", "/logs") else []))
    for kind in kinds:
        answer = http.get(f"/api/v1/jobs/{MISSING}{part}", headers={"Accept": kind})
        check(answer, 404, "job_not_found")


def test_wrong_routes_and_methods_are_refused(http: httpx.Client) -> None:
    check(http.get("/nothing/here"), 404, "not_found")
    check(http.get("/api/v1/jobs/"), 404, "not_found")
    response = http.delete("/api/v1/jobs")
    check(response, 405, "method_not_allowed")
    assert "GET" in response.headers["allow"]


def test_a_body_that_is_not_a_document_is_refused(http: httpx.Client) -> None:
    post = http.post
    check(post("/api/v1/jobs", content="x: 1"), 415, "unsupported_media_type")
    for text_type in ("text/plain", "application/x-www-form-urlencoded"):
        headers = {"Content-Type": text_type}
        response = post("/api/v1/jobs", content="x: 1", headers=headers)
        check(response, 415, "unsupported_media_type")
    for body in ("{", "[1]", "a: &x [1]\nb: *x", "a: 1\na: 2", "[" * 5000, b"\xff\xfe\x00"):
        check(post("/api/v1/jobs", content=body, headers=JSON), 400, "malformed_body")


def test_a_body_too_large_is_refused_with_and_without_a_length(http: httpx.Client) -> None:
    big = b'{"name": "' + b"x" * 2**20 + b'"}'
    check(http.post("/api/v1/jobs", content=big, headers=JSON), 413, "body_too_large")

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(big), 65536):
            yield big[start : start + 65536]

    check(http.post("/api/v1/jobs", content=chunks(), headers=JSON), 413, "body_too_large")


def test_invalid_parameters_are_refused(http: httpx.Client) -> None:
    problem = check(http.get("/api/v1/jobs?limit=0"), 422, "invalid_parameters")
    assert problem["faults"][0]["path"] == "query.limit"
    check(http.get("/api/v1/jobs?state=NOPE"), 422, "invalid_parameters")
    check(http.get("/api/v1/jobs?cursor=garbage"), 400, "invalid_cursor")


def test_a_repeated_request_says_so_and_a_conflicting_one_is_refused(http: httpx.Client) -> None:
    key = {"Idempotency-Key": "k1"}
    first, again = (http.post("/api/v1/jobs", json=SPEC, headers=key) for _ in range(2))
    job = first.json()
    assert (first.status_code, again.status_code, again.json()["id"]) == (201, 200, job["id"])
    assert first.headers["location"] == again.headers["location"]
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    other = {**SPEC, "name": "other"}
    check(http.post("/api/v1/jobs", json=other, headers=key), 409, "idempotency_conflict")
    stream = {"Accept": "text/event-stream", "Last-Event-ID": "x1"}
    response = http.get(f"/api/v1/jobs/{job['id']}/events", headers=stream)
    check(response, 422, "invalid_parameters")


def test_an_unexpected_error_reveals_no_internals(tmp_path: Path) -> None:
    class Broken:
        async def rows(self, *_: object, **__: object) -> None:
            raise RuntimeError("secret detail")

    with (
        live_server(tmp_path, overview=Broken()) as server,
        capture_logs(processors=[merge_contextvars]) as logs,
    ):
        response = httpx.get(
            f"{server.address}/api/v1/jobs", headers={"X-Request-Id": "mine"}, timeout=DEADLINE_S
        )
    (logged,) = (entry for entry in logs if entry["event"] == "request.failed")
    assert (logged["request"], logged["error"]) == ("mine", "RuntimeError('secret detail')")
    assert "secret" not in str(check(response, 500, "internal_error"))
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["holdfast-version"]


@pytest.mark.seconds
def test_readiness_names_the_failed_probes(tmp_path: Path) -> None:
    async def ready() -> None:
        return None

    async def broken() -> str:
        raise ConnectionError("no head answers")

    async def slow() -> None:
        import asyncio

        await asyncio.sleep(60)

    probes = {"database": ready, "cluster": broken, "reconciler": slow}
    with live_server(tmp_path, probes=probes, probe_timeout_s=1.0) as server:
        problem = check(httpx.get(f"{server.address}/readyz", timeout=DEADLINE_S), 503, "not_ready")
        assert problem["checks"]["database"] == "ok"
        assert "no head answers" in problem["checks"]["cluster"]
        assert "1 s" in problem["checks"]["reconciler"]
        assert httpx.get(f"{server.address}/healthz", timeout=DEADLINE_S).json() == {"status": "ok"}
