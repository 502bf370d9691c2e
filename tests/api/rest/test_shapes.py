"""What all resources have in common: lists, times, parameters, ids of requests, versions."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from tests.api.rest.test_jobs import submitted
from tests.support.service.live_server import SPEC, LiveServer
from tests.support.waiting import eventually

from holdfast.rest import openapi
from holdfast_workers import build

RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


def schemas() -> dict[str, Any]:
    found: dict[str, Any] = openapi.document()["components"]["schemas"]
    return found


def test_every_list_has_items_and_the_cursor_of_the_next_page() -> None:
    known, lists = schemas(), 0
    for path, operations in openapi.document()["paths"].items():
        for operation in operations.values():
            for answer in operation["responses"].values():
                schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
                assert schema.get("type") != "array", f"{path} answers a bare list"
                fields = known.get(schema.get("$ref", "").rpartition("/")[2], {})
                if "items" in fields.get("properties", {}):
                    assert "next_cursor" in fields["properties"], path
                    lists += 1
    assert lists >= 10


def test_no_time_is_a_number() -> None:
    for name, schema in schemas().items():
        for field, kind in schema.get("properties", {}).items():
            kinds = [kind, *kind.get("anyOf", ())]
            if field.endswith("_at") or field in ("at", "since", "until"):
                assert any(item.get("format") == "date-time" for item in kinds), f"{name}.{field}"


def test_times_are_rfc_3339_everywhere_and_filter(http: httpx.Client, server: LiveServer) -> None:
    job_id = submitted(http)
    server.run_job(job_id)
    path = f"/api/v1/jobs/{job_id}"
    eventually(lambda: http.get(path).json()["ended_at"] is not None)
    job = http.get(path).json()
    (row,) = http.get("/api/v1/jobs").json()["items"]
    events = http.get(f"{path}/events").json()["items"]
    timeline = http.get(f"{path}/timeline").json()
    for time in (job["created_at"], row["ended_at"], events[0]["at"], timeline["since"]):
        assert RFC3339.fullmatch(time), time
    assert job["created_at"] == row["created_at"] == events[0]["at"]
    until = {"since": job["created_at"], "until": "2999-01-01T00:00:00+02:00"}
    assert http.get(f"{path}/timeline", params=until).status_code == 200
    for text in ("yesterday", "1700000000", "2026-01-01T00:00:00"):
        refused = http.get(f"{path}/timeline", params={"since": text})
        assert refused.status_code == 422, refused.text
        assert refused.json()["faults"][0]["path"] == "query.since"


@pytest.mark.parametrize(
    ("path", "parameter"),
    [
        ("/api/v1/jobs", "view=row"),
        ("/api/v1/jobs", "stat=RUNNING"),
        ("/api/v1/nodes", "limit=5"),
        ("/api/v1/cluster", "x="),
        ("/api/v1/jobs/{job}", "now=true"),
        ("/api/v1/jobs/{job}/events", "limits=5"),
        ("/api/v1/jobs/{job}/logs/download", "tail=5"),
        ("/api/v1/jobs/{job}/ranks/heat", "bucket=5"),
    ],
)
def test_an_unknown_parameter_is_refused_by_name(
    http: httpx.Client, path: str, parameter: str
) -> None:
    refused = http.get(f"{path.format(job=submitted(http))}?{parameter}")
    assert refused.status_code == 422, refused.text
    name = parameter.partition("=")[0]
    assert refused.json()["faults"] == [{"path": f"query.{name}", "message": "no such parameter"}]
    assert repr(name) in refused.json()["detail"]


@pytest.mark.seconds
def test_a_list_is_continued_by_its_cursor_or_started_by_a_number(
    http: httpx.Client, server: LiveServer
) -> None:
    job_id = submitted(http)
    supervisor = server.supervisor(job_id)
    for attempt in (1, 2, 3):
        supervisor.form(attempt)
    path = f"/api/v1/jobs/{job_id}"
    eventually(lambda: len(http.get(f"{path}/attempts").json()["items"]) == 3)
    numbers, cursor, pages = [], None, 0
    while pages == 0 or cursor is not None:
        params = {"limit": "2", **({} if cursor is None else {"cursor": cursor})}
        page = http.get(f"{path}/attempts", params=params).json()
        numbers += [attempt["number"] for attempt in page["items"]]
        assert all(attempt["members"] for attempt in page["items"])
        cursor, pages = page["next_cursor"], pages + 1
    assert (numbers, pages) == ([1, 2, 3], 2)
    first = http.get(f"{path}/events", params={"limit": 1}).json()
    (second,) = http.get(
        f"{path}/events", params={"limit": 1, "cursor": first["next_cursor"]}
    ).json()["items"]
    assert second["seq"] == 2
    both = http.get(f"{path}/events", params={"after": 1, "cursor": "1"})
    assert (both.status_code, both.json()["faults"][0]["path"]) == (422, "query.after")
    for cursor in ("x", "-1", "9" * 40, ""):
        refused = http.get(f"{path}/events", params={"cursor": cursor})
        assert (refused.status_code, refused.json()["code"]) == (400, "invalid_cursor")


def test_every_answer_names_its_request_and_the_version(http: httpx.Client) -> None:
    answer = http.get("/api/v1/jobs")
    assert len(answer.headers["x-request-id"]) == 36
    version = http.get("/version").json()
    assert version.pop("build") == build.LOADED
    assert version == {"version": answer.headers["holdfast-version"], "api": "v1"}
    own = http.get("/api/v1/jobs/x", headers={"X-Request-Id": "from/my:tool-7"})
    assert own.headers["x-request-id"] == own.json()["request_id"] == "from/my:tool-7"
    for unusable in ("a b", "x" * 129, "<script>"):
        other = http.get("/readyz", headers={"X-Request-Id": unusable})
        assert len(other.headers["x-request-id"]) == 36
    refused = http.get("/api/v1/jobs", headers={"Host": "evil.example"})
    assert refused.json()["request_id"] == refused.headers["x-request-id"]


def test_an_answer_whose_form_was_chosen_says_so(http: httpx.Client, server: LiveServer) -> None:
    job_id = submitted(http)
    server.run_job(job_id)
    for feed in ("events", "logs"):
        path = f"/api/v1/jobs/{job_id}/{feed}"
        assert http.get(path).headers["vary"] == "Accept"
        with http.stream("GET", path, headers={"Accept": "text/event-stream"}) as stream:
            assert stream.headers["vary"] == "Accept"


def test_labels_are_changed_by_name(http: httpx.Client) -> None:
    path = f"/api/v1/jobs/{submitted(http, labels={'owner': 'ada', 'team': 'nlp'})}"
    changed = http.patch(path, json={"labels": {"owner": "bob", "team": None, "run": "7"}})
    assert changed.json()["spec"]["labels"] == {"owner": "bob", "run": "7"}
    assert [row["owner"] for row in http.get("/api/v1/jobs?owner=bob").json()["items"]] == ["bob"]
    for body in (
        {"labels": {"Owner": "x"}},
        {"labels": {"a": "x" * 65}},
        {"labels": {f"l{n}": "" for n in range(20)}},
        {"name": "x"},
        {"labels": {}, "priority": 1001},
        {"priority": "high"},
        {},
    ):
        refused = http.patch(path, json=body)
        assert refused.status_code == 422, (body, refused.text)
    assert http.get(path).json()["spec"]["labels"] == {"owner": "bob", "run": "7"}


@pytest.mark.seconds
def test_a_change_takes_effect_only_on_the_job_that_its_sender_has_seen(
    http: httpx.Client, server: LiveServer
) -> None:
    created = http.post("/api/v1/jobs", json=SPEC)
    path, seen = created.headers["location"], {"If-Match": created.headers["etag"]}
    server.supervisor(created.json()["id"]).run(1, 1, 5)
    eventually(lambda: http.get(path).json()["progress"]["step"] == 5)
    assert http.get(path).headers["etag"] == created.headers["etag"] == '"1"'  # progress: the same
    first = http.patch(path, json={"priority": 7}, headers=seen)
    assert (first.status_code, first.headers["etag"]) == (200, '"2"')
    again = http.patch(path, json={"priority": 7}, headers=seen)
    assert (again.status_code, again.headers["etag"]) == (200, '"2"')  # nothing to change
    for method, command, body in (
        ("PATCH", "", {"priority": 8}),
        ("POST", "/pause", None),
        ("POST", "/cancel", None),
    ):
        late = http.request(method, f"{path}{command}", json=body, headers=seen)
        assert (late.status_code, late.json()["code"]) == (412, "job_changed"), command
        assert late.json()["generation"] == 2
    job = http.get(path).json()
    assert (job["spec"]["priority"], job["desired"], job["generation"]) == (7, "running", 2)
    for tags in ("2", "", "x"):
        unknown = http.post(f"{path}/cancel", headers={"If-Match": tags})
        assert (unknown.status_code, unknown.json()["code"]) == (422, "invalid_parameters"), tags
    for tags in ('W/"2"', '"x"', '"1", "x"'):
        other = http.post(f"{path}/cancel", headers={"If-Match": tags})
        assert (other.status_code, other.json()["code"]) == (412, "job_changed"), tags
    cancelled = http.post(f"{path}/cancel", headers={"If-Match": '"1", "2"'})
    assert (cancelled.status_code, cancelled.headers["etag"]) == (202, '"3"')
    assert http.post(f"{path}/cancel", headers={"If-Match": "*"}).status_code == 202
    eventually(lambda: http.get(path).json()["released"])
    assert http.delete(path, headers={"If-Match": '"2"'}).status_code == 412
    assert http.delete(path, headers={"If-Match": '"3"'}).status_code == 200
    assert http.delete(path, headers={"If-Match": '"3"'}).status_code == 200  # as before


def test_the_queue_is_in_the_order_of_priority(http: httpx.Client, server: LiveServer) -> None:
    server.supervisor(submitted(http, name="running"))  # the cluster has room for one job
    waiting = {name: submitted(http, name=name) for name in ("a", "b", "c")}
    urgent = submitted(http, name="urgent", priority=5)
    http.patch(f"/api/v1/jobs/{waiting['b']}", json={"priority": -1})
    http.patch(f"/api/v1/jobs/{waiting['c']}", json={"priority": 1})

    def queue() -> list[tuple[int, str, int]]:
        items = http.get("/api/v1/cluster").json()["queue"]
        return [(job["place"], job["name"], job["priority"]) for job in items]

    order = [(1, "urgent", 5), (2, "c", 1), (3, "a", 0), (4, "b", -1)]
    eventually(lambda: queue() == order)
    assert http.get(f"/api/v1/jobs/{urgent}").json()["spec"]["priority"] == 5


def test_all_jobs_that_match_are_cancelled_and_never_all_jobs_by_mistake(
    http: httpx.Client, server: LiveServer
) -> None:
    ended = submitted(http, name="a0", labels={"owner": "ada"})
    server.run_job(ended)  # before there are others: the cluster has room for one job
    eventually(lambda: http.get(f"/api/v1/jobs/{ended}").json()["state"] == "SUCCEEDED")
    of_ada = [submitted(http, name=f"a{n}", labels={"owner": "ada"}) for n in (1, 2)]
    other = submitted(http, name="b")
    refused = http.post("/api/v1/jobs/cancel")
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_parameters")
    answer = http.post("/api/v1/jobs/cancel", params={"owner": "ada"})
    assert answer.status_code == 202, answer.text
    assert {job["id"] for job in answer.json()["items"]} == set(of_ada)
    assert answer.json()["next_cursor"] is None
    assert http.post("/api/v1/jobs/cancel?owner=ada").json()["items"] == []
    assert http.get(f"/api/v1/jobs/{other}").json()["desired"] == "running"
    assert http.post("/api/v1/jobs/cancel?state=SUCCEEDED").json()["items"] == []
