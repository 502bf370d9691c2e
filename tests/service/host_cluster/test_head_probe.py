"""The question to a head is asked by a child process without the secrets of its parent."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_service.host_cluster.endpoint import Endpoint
from holdfast_service.host_cluster.head_probe import ask_head

CHILD = """#!/bin/sh
env > "$0.environment"
echo '{"ray": "1", "python": "3", "nodes": []}'
"""


@pytest.fixture
def head() -> Iterator[Endpoint]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Endpoint("127.0.0.1", listener.getsockname()[1])


def test_the_child_gets_proxies_and_the_token_but_no_password(
    head: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    child.write_text(CHILD)
    child.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(child))
    for name in ("REDIS_PASSWORD", "RAY_AUTH_TOKEN", "HOLDFAST_DATABASE_URL"):
        monkeypatch.setenv(name, "not-for-the-child")
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert ask_head(head, tmp_path / "token", 10.0).ray == "1"
    found = (tmp_path / "child.environment").read_text().splitlines()
    assert {"https_proxy=http://proxy:3128", "RAY_USE_TLS=1"} <= set(found)
    assert f"RAY_AUTH_TOKEN_PATH={tmp_path / 'token'}" in found
    assert "not-for-the-child" not in "".join(found)
