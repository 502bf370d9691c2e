"""A NUL or half a character is refused wherever a request has text: PostgreSQL holds neither."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from tests.support.service.fake_cluster import FakeCluster
from tests.support.service.live_server import SPEC
from tests.support.waiting import DEADLINE_S

from holdfast.rest.app import create_app
from holdfast.rest.services import services_over
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store

pytestmark = [pytest.mark.database, pytest.mark.seconds]
IN_URLS = ("a%00b", "a%ed%a0%80b")
IN_BODIES = ("a\\u0000b", "a\\ud800b")
NUMBERS = {"step", "rank", "attempt", "number", "incident"}


@pytest.mark.parametrize("settings", ["postgresql"], indirect=True)
async def test_no_text_of_a_request_fails_in_the_database(store: Store, settings: Settings) -> None:
    app = create_app(services_over(store, FakeCluster(), settings))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1", timeout=DEADLINE_S
    ) as http:
        job = (await http.post("/api/v1/jobs", json=SPEC)).json()["id"]
        for method, url in _urls(app, job):
            answer = await http.request(method, url)
            assert answer.status_code < 500, (method, url, answer.text)
        for text in IN_BODIES:
            for method, url, body in _bodies(job, text):
                headers = {"content-type": "application/json"}
                answer = await http.request(method, url, content=body, headers=headers)
                assert answer.status_code in (400, 422), (method, url, body, answer.text)


def _urls(app: FastAPI, job: str) -> Iterator[tuple[str, str]]:
    """Each path and query parameter of each operation with such a text, one at a time. (Streams
    are refused without their `Accept`.)"""
    for path, operations in app.openapi()["paths"].items():
        in_path = re.findall(r"{(\w+)}", path)
        for method, operation in operations.items():
            for text in IN_URLS:
                for name in in_path:
                    yield method, _filled(path, job, {name: text})
                for each in operation.get("parameters", ()):
                    if each["in"] == "query" and '"string"' in json.dumps(each["schema"]):
                        yield method, f"{_filled(path, job, {})}?{each['name']}={text}"


def _filled(path: str, job: str, given: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1]
        return given.get(name) or (job if name == "job_id" else "1" if name in NUMBERS else "x")

    return re.sub(r"{(\w+)}", value, path)


def _bodies(job: str, text: str) -> Iterator[tuple[str, str, str]]:
    specs: list[dict[str, Any]] = [
        {**SPEC, "name": "TEXT"},
        {**SPEC, "labels": {"owner": "TEXT"}},
        {**SPEC, "labels": {"TEXT": "x"}},
        {**SPEC, "env": {"A": "TEXT"}},
        {**SPEC, "env": {"TEXT": "x"}},
        {**SPEC, "config": {"TEXT": "x"}},
        {**SPEC, "config": {"x": ["TEXT"]}},
        {**SPEC, "init_from": "TEXT"},
        {"name": "x", "command": "python TEXT"},
        {"name": "x", "runtime_env": {"pip": ["TEXT"]}},
        {**SPEC, "resources": {"node_labels": {"disk": "TEXT"}}},
    ]
    for spec in specs:
        yield "POST", "/api/v1/jobs", json.dumps(spec).replace("TEXT", text)
    yield "PATCH", f"/api/v1/jobs/{job}", f'{{"labels": {{"owner": "{text}"}}}}'
    yield "POST", "/api/v1/nodes/x/cordon", f'{{"reason": "{text}"}}'
