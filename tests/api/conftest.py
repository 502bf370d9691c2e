"""A running server, an HTTP client and a Python client for every test of the API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
    with httpx.Client(base_url=server.address, timeout=DEADLINE_S, trust_env=False) as client:
        yield client


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    with Client(server.address) as connected:
        yield connected
