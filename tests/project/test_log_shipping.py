"""The example of log shipping takes the lines that servers and nodes write, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CONFIG = Path(__file__).parents[2] / "deploy/logs/rsyslog.conf"
NOT_THERE = "rsyslogd is not installed (Debian: rsyslog)"
WRITER = """
import structlog
from holdfast_workers.log_setup import configure
configure(json_fields={"job": "j1", "node": "node0"})
structlog.get_logger().warning("rank_stalled", rank=3)
"""
SERVER = """
import structlog
from holdfast_workers.log_setup import configure
configure(json_fields={})
structlog.get_logger().error("request_failed", route="/api/v1/jobs")
"""
ROUND_S = 60.0


@pytest.fixture
def daemon() -> str:
    found = shutil.which("rsyslogd", path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None and os.environ.get("HOLDFAST_NO_SKIPS"):
        pytest.fail(NOT_THERE)
    return found or pytest.skip(NOT_THERE)


@pytest.fixture
def collector() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(ROUND_S)
        yield listener


def written_by(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stderr


def test_lines_of_server_and_nodes_reach_a_collector(
    daemon: str, collector: socket.socket, tmp_path: Path
) -> None:
    logs = tmp_path / "session_2026-01-01/logs"
    logs.mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(logs.parent)
    other = '[core] a line of Ray\n{"from": "another program"}\n'
    (logs / "worker-1.err").write_text(other + written_by(WRITER))
    (tmp_path / "serve.log").write_text(written_by(SERVER))
    text = CONFIG.read_text()
    for old, new in (
        ("/var/log/holdfast", str(tmp_path)),
        ("/tmp/ray", str(tmp_path)),
        ('"logs.internal"', '"127.0.0.1"'),
        ('"5170"', f'"{collector.getsockname()[1]}"'),
    ):
        assert old in text
        text = text.replace(old, new)
    config = tmp_path / "rsyslog.conf"
    config.write_text(f'global(workDirectory="{tmp_path}")\n{text}')
    command = [daemon, "-n", "-f", str(config), "-i", str(tmp_path / "pid")]
    with subprocess.Popen(command) as running:
        try:
            received = lines(collector, 2)
        finally:
            running.terminate()
            running.wait(60)
    node, server = sorted(received, key=lambda line: line["event"])
    assert (node["event"], node["rank"], node["job"], node["source"]) == (
        "rank_stalled",
        3,
        "j1",
        "holdfast-node",
    )
    assert (server["event"], server["level"], server["source"]) == (
        "request_failed",
        "error",
        "holdfast-serve",
    )
    assert node["machine"] and node["at"] > 0


def lines(collector: socket.socket, number: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    connection, _ = collector.accept()
    with connection, connection.makefile("r") as stream:
        connection.settimeout(ROUND_S)
        for line in stream:
            found.append(json.loads(line))
            if len(found) >= number:
                break
    return found
