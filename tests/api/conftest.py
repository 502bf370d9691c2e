"""A running server, an HTTP client and a Python client for every test of the API."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest
from tests.support.service.live_server import LiveServer, live_server
from tests.support.waiting import DEADLINE_S

from holdfast import Client


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with live_server(tmp_path) as started:
        yield started


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    def check(response: httpx.Response) -> None:
        if response.headers.get("Content-Type") == "application/problem+json":
            assert own_paths(server, response) == []

    with httpx.Client(
        base_url=server.address,
        timeout=DEADLINE_S,
        trust_env=False,
        event_hooks={"response": [check]},
    ) as client:
        yield client


def own_paths(server: LiveServer, response: httpx.Response) -> list[str]:
    """The server's own paths that a problem shows. A job's checkpoints are shown by their URIs
    anyway, and what the user gave may be repeated."""
    request = response.request
    given = unquote(str(request.url))
    with contextlib.suppress(httpx.RequestNotRead):  # it was streamed
        given += request.content.decode(errors="replace")
    folder = server.settings.data_dir.absolute()
    shown = re.findall(rf"{re.escape(str(folder))}[^\s\"'\\:;,)]*", response.read().decode())
    return [path for path in shown if path not in given and not path.startswith(f"{folder}/jobs/")]


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    with Client(server.address) as connected:
        yield connected
